// Numbers, durations and times as text.

const NOTHING = "–";

/** A number with about four significant digits. */
function formatNumber(value) {
  if (value === null || value === undefined) return NOTHING;
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en-US");
  if (size !== 0 && (size < 1e-3 || size >= 1e6))
    return value
      .toExponential(2)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(4, Math.ceil(Math.log10(size))) });
}

/** A value that a user has set, with all digits and without separators, as it may be copied. */
function formatExact(value) {
  return Number.isFinite(value) ? String(value) : formatNumber(value);
}

/** The same without separators of thousands: for what is an index, such as the number of a trial, or what a user has set. */
function formatPlain(value) {
  if (Number.isInteger(value)) return String(value);
  return typeof value === "number" ? formatNumber(value).replaceAll(",", "") : formatNumber(value);
}

function formatDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NOTHING;
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/** The local time of day, with the date unless it is the day of `reference`. */
function formatClock(time, reference = time) {
  const date = new Date(time * 1000);
  const clock = date.toLocaleTimeString("en-GB");
  const isSameDay = date.toDateString() === new Date(reference * 1000).toDateString();
  return isSameDay ? clock : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock}`;
}

function two(number) {
  return String(number).padStart(2, "0");
}

/** `plural(2, "worker")` is "2 workers". */
function plural(count, noun) {
  return `${formatNumber(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** A few of many numbers: "1, 2, 3 and 7 more". */
function someOf(numbers, count = 5) {
  const shown = numbers.slice(0, count).join(", ");
  return numbers.length > count ? `${shown} and ${numbers.length - count} more` : shown;
}
