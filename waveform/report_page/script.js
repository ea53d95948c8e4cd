"use strict";
// Players of a row share a position: whichever is chosen goes on where the one before it was.
const STEP_S = 0.25;
const rows = [...document.querySelectorAll(".row")];
const players = [...document.querySelectorAll(".player")];
const part = (player, name) => player.querySelector(name);
const sound = (player) => part(player, "audio");
const seconds = (player) => Number(player.dataset.seconds);
let current = null;

function show(player) {
  const { currentTime, paused } = sound(player);
  const button = part(player, ".play");
  button.textContent = paused ? "▶" : "❚❚";
  button.setAttribute("aria-label", paused ? "play" : "pause");
  part(player, ".playhead").style.left = `${(100 * currentTime) / seconds(player)}%`;
  part(player, ".time").textContent = `${currentTime.toFixed(2)} / ${seconds(player).toFixed(2)} s`;
  if (!paused) requestAnimationFrame(() => show(player));
}

function choose(player) {
  if (player === current) return;
  const before = current && sound(current);
  const goesOn = before && !before.paused;
  const sameRow = before && current.closest(".row") === player.closest(".row");
  if (before) before.pause();
  current = player;
  players.forEach((other) => other.classList.toggle("current", other === player));
  player.closest(".row").querySelectorAll("audio").forEach((audio) => (audio.preload = "auto"));
  if (sameRow) {
    seek(player, before.ended ? 0 : before.currentTime);
    if (goesOn) play(player);
  }
  player.focus({ preventScroll: true });
}

function play(player) {
  sound(player).play().catch((error) => {
    if (error.name !== "AbortError") throw error; // another one was chosen meanwhile
  });
}

function seek(player, time) {
  sound(player).currentTime = Math.min(Math.max(time, 0), seconds(player));
  show(player);
}

function toggle(player) {
  const wasPlaying = !sound(player).paused;
  choose(player);
  if (wasPlaying) sound(player).pause();
  else play(player);
}

for (const player of players) {
  for (const event of ["play", "pause", "ended", "seeked", "timeupdate"]) {
    sound(player).addEventListener(event, () => show(player));
  }
  part(player, ".play").addEventListener("click", () => toggle(player));
  part(player, ".track").addEventListener("click", (event) => {
    const { left, width } = event.currentTarget.getBoundingClientRect();
    choose(player);
    seek(player, ((event.clientX - left) / width) * seconds(player));
    play(player);
  });
  player.addEventListener("keydown", (event) => {
    const shown = [...player.parentElement.children];
    const next = (step) => choose(shown[(shown.indexOf(player) + step + shown.length) % shown.length]);
    const actions = {
      " ": () => toggle(player),
      ArrowLeft: () => seek(player, sound(player).currentTime - STEP_S),
      ArrowRight: () => seek(player, sound(player).currentTime + STEP_S),
      ArrowUp: () => next(-1),
      ArrowDown: () => next(1),
    };
    const rating = isBlind() && /^[1-5]$/.test(event.key) && part(player, `input[value="${event.key}"]`);
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.target.matches("input") || (event.target.matches("button") && event.key === " ")) return;
    if (!rating && !actions[event.key]) return;
    event.preventDefault();
    if (rating) rating.click();
    else actions[event.key]();
  });
  const ownFrom = Number(player.dataset.ownFrom);
  part(player, ".own").hidden = ownFrom === 0 || ownFrom >= seconds(player);
  part(player, ".own").style.left = `${(100 * ownFrom) / seconds(player)}%`;
  show(player);
}

// Blind mode: rows and players in a random order, without names; leaving it brings all back.
const isBlind = () => document.body.classList.contains("blind");
const rated = () => players.flatMap((player) => {
  const chosen = part(player, "input:checked");
  const { number, title } = player.closest(".row").dataset;
  return chosen ? [{ row: Number(number), title, run: player.dataset.label, rating: Number(chosen.value) }] : [];
});
let isExported = true;

function shuffled(items) {
  const keyed = items.map((item) => [Math.random(), item]);
  return keyed.sort((a, b) => a[0] - b[0]).map(([, item]) => item);
}

function setBlind(on) {
  const ordered = on ? shuffled : (items) => items;
  for (const player of players) { // so that positions left from before do not tell them apart
    sound(player).pause();
    seek(player, 0);
  }
  if (current) current.classList.remove("current");
  current = null;
  document.body.classList.toggle("blind", on);
  document.querySelector("#blind").setAttribute("aria-pressed", on);
  ordered(rows).forEach((row, i) => {
    row.parentElement.append(row);
    part(row, "h3").textContent = on ? `Row ${i + 1}` : row.dataset.title;
    ordered(players.filter((player) => row.contains(player))).forEach((player, j) => {
      const name = on ? `Sound ${String.fromCharCode(65 + j)}` : player.dataset.label;
      player.parentElement.append(player);
      player.setAttribute("aria-label", name);
      part(player, ".label").lastChild.textContent = name;
    });
  });
}

if (players.length) {
  document.querySelector("#blind").addEventListener("click", () => setBlind(!isBlind()));
  document.querySelector("#rows").addEventListener("change", () => {
    isExported = false;
    document.querySelector("#rated").textContent = `${rated().length} of ${players.length} rated.`;
  });
  document.querySelector("#export").addEventListener("click", () => {
    const content = { kind: "waveform ratings", sounds: document.body.dataset.sounds, ratings: rated() };
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 1)], { type: "application/json" }));
    link.download = "ratings.json";
    link.click();
    isExported = true;
  });
  window.addEventListener("beforeunload", (event) => isExported || event.preventDefault());
}
