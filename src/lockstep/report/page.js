"use strict";
// Hover, click and zoom. All charts over steps share one range. Without this script every chart is drawn in full.
const format = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en-US") : String(+v.toPrecision(4));
const within = (v, [low, high]) => v >= low && v <= high;
const charts = [...document.querySelectorAll(".chart")].map(figure => {
  const part = name => figure.querySelector(name), data = JSON.parse(part("script").textContent);
  return {figure, data, plot: part(".plot"), svg: part("svg"), xs: part(".x"), ys: part(".y"), cursor: part(".cursor"), output: part("output")};
});
const full = charts.length ? charts[0].data.x : [0, 1];
let range = full;

function ticks([low, high]) {
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const size = [1, 2, 5, 10].find(factor => factor * power >= raw) * power, list = [];
  for (let i = Math.ceil(low / size); i * size <= high; i++) list.push(+(i * size).toPrecision(12));
  return list;
}

function label(list, [low, high], side) {
  list.replaceChildren(...ticks([low, high]).map(value => {
    const item = document.createElement("li");
    item.style[side] = `${100 * (value - low) / (high - low)}%`;
    item.dataset.v = format(value);
    return item;
  }));
}

function draw({data, svg, xs, ys}) {
  let [low, high] = data.y;
  if (!data.fixed && range !== full) {
    const seen = data.lines.flatMap(line => line.x.flatMap((x, i) => within(x, range) ? [(line.low || line.y)[i], (line.high || line.y)[i]] : []));
    if (seen.length) {
      const least = Math.min(...seen), most = Math.max(...seen), pad = (most - least) * .05 || Math.abs(most) * .1 || 1;
      [low, high] = [least - pad, most + pad];
    }
  }
  const px = x => 1000 * (x - data.x[0]) / (data.x[1] - data.x[0]), py = y => 300 * (data.y[1] - y) / (data.y[1] - data.y[0]);
  svg.setAttribute("viewBox", `${px(range[0])} ${py(high)} ${px(range[1]) - px(range[0])} ${py(low) - py(high)}`);
  label(xs, range, "left");
  label(ys, [low, high], "bottom");
}

function zoom(low, high) {
  const least = Math.min(4, full[1] - full[0]), middle = (low + high) / 2;
  if (high - low < least) [low, high] = [middle - least / 2, middle + least / 2];
  range = [Math.max(full[0], low), Math.min(full[1], high)];
  if (range[0] <= full[0] && range[1] >= full[1]) range = full;
  charts.forEach(draw);
  document.documentElement.dataset.range = range.map(Math.round).join(" ");
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
function ask({output, step}) {
  const run = document.body.dataset.run;
  if (run && !output.textContent.includes("lockstep why")) output.textContent += `\nlockstep why ${run} --step ${step}`;
}

const leave = () => charts.forEach(({output, cursor}) => { output.hidden = cursor.hidden = true; });

for (const chart of charts) {
  const {plot, figure} = chart, picked = document.createElement("i");
  let from = null;
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
    else ask(chart);
  });
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("dblclick", () => zoom(...full));
  plot.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key], size = {"+": .5, "-": 2}[event.key];
    if (move) point(chart, Math.min(range[1], Math.max(range[0], (chart.at ?? range[0]) + move * (range[1] - range[0]) / 50)));
    else if (size) scale(size);
    else if (event.key === "Escape") zoom(...full);
    else return;
    event.preventDefault();
  });
  const tools = document.createElement("span");
  tools.className = "zoom";
  for (const [sign, name, act] of [["+", "zoom in", () => scale(.5)], ["−", "zoom out", () => scale(2)], ["↺", "show all steps", () => zoom(...full)]]) {
    const button = document.createElement("button");
    Object.assign(button, {type: "button", textContent: sign, title: name, onclick: act});
    button.setAttribute("aria-label", name);
    tools.append(button);
  }
  figure.querySelector("figcaption").prepend(tools);
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
