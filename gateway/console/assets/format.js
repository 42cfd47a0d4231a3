// Numbers for people: three digits that say something, and the unit beside them.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 2 : 1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(2)} s`;
  return value < 6000 ? `${Math.round(value)} s` : `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (value >= 999.5 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export const rate = (value) => `${bytes(value)}/s`;

export function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 99_950) return `${(value / 1000).toFixed(0)}k`;
  if (value >= 9_995) return `${(value / 1000).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export const share = (value) => `${Math.round(100 * value)} %`;

export function clock(milliseconds) {
  return new Date(milliseconds).toLocaleTimeString(undefined, { hour12: false });
}

export function ago(milliseconds) {
  const passed = Math.max(0, (Date.now() - milliseconds) / 1000);
  if (passed < 60) return `${Math.floor(passed)} s ago`;
  return passed < 3600 ? `${Math.floor(passed / 60)} min ago` : `${Math.floor(passed / 3600)} h ago`;
}
