// Words of the page for numbers, times and texts without a name.
"use strict";

export const count = (number) => number.toLocaleString("en");
export const several = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share < 0.095 ? 1 : 0)}%`;

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (number >= 1024 && power < units.length - 1) { number /= 1024; power += 1; }
  return `${number.toFixed(power ? 1 : 0)} ${units[power]}`;
}

export function when(seconds) {
  const then = new Date(1000 * seconds), today = new Date().toDateString() === then.toDateString();
  return today ? then.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false })
    : then.toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

/** Words for the time that a prompt still takes, as fast as it goes since the first event. */
export function timeLeft(clock = () => performance.now()) {
  let first = null;
  return ({ done, total, reused }) => {
    const now = clock();
    first ??= { done: Math.max(done, reused), now };
    const seconds = (now - first.now) / 1e3;
    if (seconds < 1 || done <= first.done || done >= total) return "";
    const left = seconds * (total - done) / (done - first.done);
    return left < 90 ? `, about ${Math.ceil(left)} s left` : `, about ${Math.round(left / 60)} min left`;
  };
}

/** A name for a text without one. */
export function firstWords(text) {
  const line = text.trim().split("\n")[0].replace(/^[#\s]+/, "").trim();
  return line.length > 48 ? `${line.slice(0, 48).trimEnd()}…` : line || "Pasted text";
}
