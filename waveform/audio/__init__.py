"""Audio in and out: files become blocks at one sample rate, then tokens; samples become WAV files and pictures."""
