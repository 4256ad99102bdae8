"use strict";
// Hover, click and zoom. All charts over steps share one range. Without this script every chart is drawn in full.
const digits = (v, n) => v.toLocaleString("en-US", {maximumSignificantDigits: n});
const format = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en-US") : digits(v, 4);
const within = (v, [low, high]) => v >= low && v <= high;
const charts = [...document.querySelectorAll(".chart")].map(figure => {
  const part = name => figure.querySelector(name), data = JSON.parse(part("script").textContent);
  return {figure, data, plot: part(".plot"), svg: part("svg"), xs: part(".x"), ys: part(".y"), cursor: part(".cursor"), output: part("output")};
});
const full = charts.length ? charts[0].data.x : [0, 1];
const shown = document.createElement("span");  // the range, while it is not the full one
let range = full;

// The short form of a tick, as charts.py has it.
function short(v) {
  const [size, prefix] = [[1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([size]) => Math.abs(v) >= Math.max(size, 9999.5)) ?? [];
  return size ? +(v / size).toFixed(1) + prefix : digits(v, 4);
}

function ticks([low, high], least) {
  const gap = Math.max((high - low) / 5, least), power = 10 ** Math.floor(Math.log10(gap));
  const size = [1, 2, 5, 10].find(factor => factor * power >= gap) * power, list = [];
  for (let i = Math.ceil(low / size); i * size <= high; i++) list.push(+(i * size).toPrecision(12));
  return list;
}

function label(list, [low, high], side, least = 0) {
  const values = ticks([low, high], least), labels = values.map(short), isClear = new Set(labels).size === labels.length;
  list.replaceChildren(...values.map((value, i) => {
    const item = document.createElement("li");
    item.style[side] = `${100 * (value - low) / (high - low)}%`;
    item.dataset.v = isClear ? labels[i] : digits(value, 12);
    return item;
  }));
}

function draw({data, svg, xs, ys}) {
  let [low, high] = data.y;
  if (!data.fixed && range !== full) {
    const seen = data.lines.flatMap(line => line.x.flatMap((x, i) => within(x, range) ? [(line.low || line.y)[i], (line.high || line.y)[i]] : []));
    if (seen.length) {
      const least = Math.min(...seen), cut = data.most !== null && least < data.most ? data.most : Infinity;
      const most = Math.min(cut, Math.max(...seen)), pad = (most - least) * .05 || Math.abs(most) * .1 || 1;
      [low, high] = [least - pad, most + pad];
    }
  }
  const px = x => 1000 * (x - data.x[0]) / (data.x[1] - data.x[0]), py = y => 300 * (data.y[1] - y) / (data.y[1] - data.y[0]);
  svg.setAttribute("viewBox", `${px(range[0])} ${py(high)} ${px(range[1]) - px(range[0])} ${py(low) - py(high)}`);
  label(xs, range, "left", 1);
  label(ys, [low, high], "bottom");
}

function zoom(low, high) {
  const least = Math.min(4, full[1] - full[0]), middle = (low + high) / 2;
  if (high - low < least) [low, high] = [middle - least / 2, middle + least / 2];
  range = [Math.max(full[0], low), Math.min(full[1], high)];
  if (range[0] <= full[0] && range[1] >= full[1]) range = full;
  charts.forEach(draw);
  document.documentElement.dataset.range = range.map(Math.round).join(" ");
  shown.textContent = range === full ? "" : `steps ${range.map(v => digits(Math.round(v), 12)).join(" to ")}`;
}

const scale = factor => { const middle = (range[0] + range[1]) / 2, half = (range[1] - range[0]) * factor / 2; zoom(middle - half, middle + half); };

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function point(chart, x) {
  const share = (x - range[0]) / (range[1] - range[0]), {data, output} = chart, reach = (range[1] - range[0]) / 60;
  const first = data.lines[0], at = first.x[nearest(first.x, x)];
  const rows = data.lines.flatMap(({name, x: xs, y, low, high}) => {
    const i = nearest(xs, x);
    if (Math.abs(xs[i] - x) > Math.max(2 * reach, Math.abs(at - x))) return [];
    const spread = low && !data.fixed && low[i] < high[i] ? ` (${format(low[i])} to ${format(high[i])})` : "";
    return [`${name ? name + " " : ""}${format(y[i])} ${data.unit}${spread}`];
  });
  const marks = data.marks.filter(mark => Math.abs(mark[0] - x) < reach).map(mark => "✕ " + mark[1]);
  charts.forEach(other => { other.output.hidden = other !== chart; other.cursor.hidden = false; other.cursor.style.left = `${100 * share}%`; });
  chart.at = x;
  chart.step = Math.round(at);
  output.textContent = [`step ${Math.round(at).toLocaleString("en-US")}`, ...rows, ...marks].join("\n");
  Object.assign(output.style, share < .5 ? {left: `${100 * share + 1}%`, right: "auto"} : {right: `${101 - 100 * share}%`, left: "auto"});
}

// A click shows the command that tells why the step has this loss.
function ask({asked, step}) {
  const run = document.body.dataset.run;
  if (run && step !== undefined) asked.textContent = `lockstep why ${run} --step ${step}`;
}

const leave = () => charts.forEach(({output, cursor}) => { output.hidden = cursor.hidden = true; });

for (const chart of charts) {
  const {plot, figure} = chart, picked = document.createElement("i");
  let from = null;
  figure.append(chart.asked = document.createElement("code"));
  if (document.body.dataset.run) plot.ariaLabel += ", Enter shows the command that tells why a step has its loss";
  const x = event => { const box = plot.getBoundingClientRect(); return range[0] + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * (range[1] - range[0]); };
  const place = value => 100 * (value - range[0]) / (range[1] - range[0]);
  picked.className = "pick";
  plot.addEventListener("pointerdown", event => { if (event.pointerType === "mouse" && event.button === 0) { from = x(event); plot.setPointerCapture(event.pointerId); } });
  plot.addEventListener("pointermove", event => {
    point(chart, x(event));
    if (from === null) return;
    plot.append(picked);
    const [low, high] = [from, x(event)].sort((a, b) => a - b);
    Object.assign(picked.style, {left: `${place(low)}%`, width: `${place(high) - place(low)}%`});
  });
  plot.addEventListener("pointerup", event => {
    const [low, high] = [from === null ? x(event) : from, x(event)].sort((a, b) => a - b);
    from = null;
    picked.remove();
    if (place(high) - place(low) > 2) zoom(low, high);
    else { point(chart, x(event)); ask(chart); }
  });
  plot.addEventListener("pointerleave", event => event.pointerType === "mouse" && leave());  // a finger leaves at once
  plot.addEventListener("blur", leave);
  plot.addEventListener("dblclick", () => zoom(...full));
  plot.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key], size = {"+": .5, "-": 2}[event.key];
    if (move) point(chart, Math.min(range[1], Math.max(range[0], (chart.at ?? range[0]) + move * (range[1] - range[0]) / 50)));
    else if (size) scale(size);
    else if (event.key === "Enter") ask(chart);
    else if (event.key === "Escape") zoom(...full);
    else return;
    event.preventDefault();
  });
}

if (charts.length) {
  const tools = document.createElement("div"), acts = [["+", "zoom in", () => scale(.5)], ["−", "zoom out", () => scale(2)], ["↺", "show all steps", () => zoom(...full)]];
  tools.className = "zoom";
  shown.ariaLive = "polite";
  tools.append(shown, ...acts.map(([textContent, title, onclick]) => Object.assign(document.createElement("button"), {type: "button", textContent, title, ariaLabel: title, onclick})));
  charts[0].figure.closest("section").querySelector("h2").after(tools);
}

for (const box of document.querySelectorAll(".timeline .plot, .bar")) {
  const output = box.querySelector("output");
  box.addEventListener("pointermove", event => {
    const title = event.target.querySelector("title"), {left, width} = box.getBoundingClientRect(), share = (event.clientX - left) / width;
    output.hidden = !title;
    if (title) output.textContent = title.textContent;
    Object.assign(output.style, share < .5 ? {left: `${100 * share}%`, right: "auto"} : {right: `${100 - 100 * share}%`, left: "auto"});
  });
  box.addEventListener("pointerleave", () => { output.hidden = true; });
}
