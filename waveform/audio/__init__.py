"""Audio in and out: files become blocks of one rate and tokens; samples become WAV files and pictures."""
