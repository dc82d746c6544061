"use strict";
// What all figures share: the data, colours, numbers as text, axes, and the words that stand at a point.

const data = JSON.parse(document.getElementById("data").textContent);
const [MEAN, P99, PER_TOKEN, SOLVED, QUEUE, UTILISATION] = data.metrics.keys();
const LATENCIES = [
  { index: MEAN, name: "Mean", label: "mean workflow latency (s)", unit: "s" },
  { index: P99, name: "p99", label: "p99 workflow latency (s)", unit: "s" },
  { index: PER_TOKEN, name: "Per token", label: "latency per output token (ms)", unit: "ms" },
];
const DARK = {
  "#000000": "#f4f4f4",
  "#0072B2": "#2f8be0",
  "#56B4E9": "#9bdcff",
  "#8C564B": "#c58f83",
  "#5B3F8C": "#ac90e0",
  "#4D4D4D": "#c4c4c4",
};
const SHAPES = {
  circle: '<circle cx="8" cy="8" r="5.2"/>',
  "triangle-down": '<path d="M2 3.5h12L8 14z"/>',
  "triangle-up": '<path d="M2 12.5h12L8 2z"/>',
  "triangle-right": '<path d="M3.5 2v12L14 8z"/>',
  "triangle-left": '<path d="M12.5 2v12L2 8z"/>',
  square: '<path d="M3 3h10v10H3z"/>',
  cross: '<path d="M6 2h4v4h4v4h-4v4H6v-4H2V6h4z"/>',
  x: '<path d="M4.5 2 8 5.5 11.5 2 14 4.5 10.5 8l3.5 3.5-2.5 2.5L8 10.5 4.5 14 2 11.5 5.5 8 2 4.5z"/>',
  diamond: '<path d="m8 1.5 6.5 6.5L8 14.5 1.5 8z"/>',
  pentagon: '<path d="m8 2 6 4.5L11.7 13.5H4.3L2 6.5z"/>',
  hexagon: '<path d="m8 1.5 5.6 3.2v6.6L8 14.5l-5.6-3.2V4.7z"/>',
  hexagon2: '<path d="M1.5 8 4.7 2.4h6.6L14.5 8l-3.2 5.6H4.7z"/>',
  star: '<path d="m8 1 1.9 4.7 5.1.3-3.9 3.3 1.3 5L8 11.5l-4.4 2.8 1.3-5L1 6l5.1-.3z"/>',
  "diamond-tall": '<path d="M8 1l3.8 7L8 15 4.2 8z"/>',
};

let printing = false;
const dark = () => !printing && matchMedia("(prefers-color-scheme: dark)").matches;
const colourOf = (colour) => (dark() && DARK[colour]) || colour;
const css = (name) =>
  (printing &&
    {
      "--ink": "#1c2126",
      "--soft": "#59626c",
      "--grid": "#e6e4de",
      "--card": "#fff",
      "--line": "#ccc",
      "--paper": "#fff",
    }[name]) ||
  getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const narrow = () => innerWidth < 700;

// Plotly reads tags in labels; names of users' traces and policies must stay text
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const fmt = (value) => {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size === 0
    ? "0"
    : size >= 100
      ? value.toFixed(0)
      : size >= 10
        ? value.toFixed(1)
        : size >= 0.1
          ? value.toFixed(2)
          : value.toPrecision(2);
};
const per100 = ([mean, half]) => (mean === null ? [null, null] : [100 * mean, 100 * half]);
const stat = (point, index) =>
  index === SOLVED || index === UTILISATION ? per100(point.stats[index]) : point.stats[index];
const lineName = (point) => data.series[point.series].name + (point.tau === null ? "" : ` tau ${point.tau}`);
const withHalf = ([mean, half], point) =>
  fmt(mean) + (point.seeds.length > 1 && mean !== null ? ` ± ${fmt(half)}` : "");

function axis(title, more) {
  return {
    title: { text: title, standoff: 10 },
    gridcolor: css("--grid"),
    linecolor: css("--line"),
    zeroline: false,
    automargin: true,
    tickfont: { color: css("--soft") },
    fixedrange: matchMedia("(pointer: coarse)").matches,
    ...more,
  };
}

function layout(more) {
  const touch = matchMedia("(pointer: coarse)").matches;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    showlegend: false,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
    dragmode: touch ? false : "zoom",
    hovermode: "closest",
    font: { family: css("--sans"), size: 13, color: css("--soft") },
    hoverlabel: {
      bgcolor: css("--card"),
      bordercolor: css("--soft"),
      font: { family: css("--sans"), color: css("--ink"), size: 13 },
      align: "left",
      namelength: 0,
    },
    margin: { l: narrow() ? 44 : 60, r: 14, t: 14, b: 50 },
    ...more,
  };
}

function hover(point) {
  const first = ["trace", "combo", "rps", "slots"];
  const order = (name) => (first.indexOf(name) + first.length + 1) % (first.length + 1);
  const axes = Object.keys(point.config)
    .filter((name) => name !== "policy" && name !== "tau")
    .sort((a, b) => order(a) - order(b));
  const lines = [];
  for (const word of [...axes.map((name) => `${name} ${point.config[name]}`), point.policy].filter(Boolean)) {
    const last = lines.at(-1);
    if (last && last.length + word.length < 46) lines[lines.length - 1] = `${last}, ${word}`;
    else lines.push(word);
  }
  const numbers = [
    ...LATENCIES.map(({ index, name, unit }) => `${name} latency ${withHalf(stat(point, index), point)} ${unit}`),
    `Solved ${withHalf(stat(point, SOLVED), point)} %`,
    `Queue ${withHalf(stat(point, QUEUE), point)} s`,
    `Seeds ${point.seeds.join(", ")}${point.seeds.length > 1 ? "; ± is half of the 95 % interval" : ""}`,
  ];
  if (!point.steady) numbers.push("Not steady: backlog still grew at the last arrival");
  if (point.rejected) numbers.push(`${point.rejected} workflows rejected`);
  const wrapped = lines.flatMap((line) => line.match(/.{1,52}(?:\s|$)|\S{1,52}/g) || [line]);
  return `<b>${plain(lineName(point))}</b><br>${[...numbers, ...wrapped].map((line) => plain(line.trim())).join("<br>")}`;
}
