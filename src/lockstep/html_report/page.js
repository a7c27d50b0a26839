"use strict";
// Gives the numbers of the page to plotly: the curves smoothed, over steps or time; and asks for news where it is served.
const colors = ["#2f81d6", "#d9730d", "#2f9e6e", "#c2508b", "#8468d8", "#8a8a1f", "#3f8fa3", "#c0503f"];
const dashes = ["solid", "dash", "dot", "dashdot"];
const signs = { generation: "triangle-up", checkpoint: "diamond", fault: "x" };
const at = (id) => document.getElementById(id);
let charts = JSON.parse(at("charts").textContent);

function smoothed(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function curves(chart) {
  const axis = at("axis").value, weight = Number(at("smoothing").value), data = [], shapes = [];
  chart.lines.forEach((line, run) => {
    const look = { x: line[axis], type: "scatter", mode: line.value.length < 40 ? "lines+markers" : "lines", name: line.name };
    const style = { color: colors[run % 8], dash: dashes[Math.floor(run / 8) % 4], width: 1.6 };
    if (weight) data.push({ ...look, y: line.value, mode: "lines", opacity: 0.3, showlegend: false, hoverinfo: "skip", line: { ...style, width: 1 } });
    data.push({ ...look, y: weight ? smoothed(line.value, weight) : line.value, line: style });
  });
  for (const kind of Object.keys(signs)) {
    const those = chart.events.filter((one) => one.kind === kind);
    if (!those.length) continue;
    data.push({ x: those.map((one) => one[axis]), y: those.map(() => 0.03), yaxis: "y2", mode: "markers", name: kind,
      text: those.map((one) => one.what), hoverinfo: "text", marker: { symbol: signs[kind], size: 8, color: those.map((one) => colors[one.run % 8]) } });
    if (kind !== "checkpoint") {
      for (const one of those) shapes.push({ type: "line", x0: one[axis], x1: one[axis], y0: 0, y1: 1, yref: "paper", line: { color: colors[one.run % 8], width: 1, dash: "dot" } });
    }
  }
  const range = [at("from").value, at("to").value].map((text) => (text === "" ? null : Number(text)));
  return { data, layout: { shapes, uirevision: [axis, ...range].join(), yaxis: { type: at("logarithmic").checked ? "log" : "linear" },
    xaxis: { title: { text: axis === "step" ? "step" : chart.unit + " since the start" }, ...(range.some((end) => end !== null) && { autorangeoptions: {}, range }) },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } } };
}

function draw() {
  for (const [section, those] of Object.entries(charts)) {
    const place = at(section).querySelector(".charts");
    those.forEach((chart, number) => {
      const figure = place.children[number] || place.appendChild(document.createElement("figure"));
      if (!figure.children.length) {
        figure.append(document.createElement("figcaption"), document.createElement("div"));
      }
      const [caption, plot] = figure.children;
      caption.innerHTML = chart.title;  // escaped where it was made
      plot.setAttribute("role", "group");
      plot.setAttribute("aria-label", caption.textContent + ": a chart; its numbers are in the tables of this page");
      const { data, layout } = chart.lines ? curves(chart) : chart;
      Plotly.react(plot, data, { height: 300, uirevision: "keep", colorway: colors, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
        legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom" }, hovermode: chart.lines ? "x unified" : "closest", showlegend: true, ...layout,
        modebar: { bgcolor: "transparent", color: "#8590a0", activecolor: "#2f81d6", remove: ["select2d", "lasso2d"] }, margin: { l: 50, r: 10, t: 34, b: 75 }, xaxis: { automargin: true, ...layout.xaxis }, yaxis: { automargin: true, ...layout.yaxis } },
        { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" });
    });
    while (place.children.length > those.length) place.lastChild.remove();
  }
}

async function news() {
  try {
    const answer = await fetch("news", { cache: "no-store" });
    if (!answer.ok) throw new Error(answer.statusText);
    const told = await answer.json();
    for (const [name, inside] of Object.entries(told.sections)) {
      const section = at(name);
      if (section && section.dataset.shown !== inside) {
        const place = section.querySelector(".charts"), open = [...section.querySelectorAll("details")].map((one) => one.open);
        section.dataset.shown = section.innerHTML = inside;  // escaped where it was made
        section.querySelectorAll("details").forEach((one, number) => { one.open = open[number] ?? one.open; });
        if (place) section.querySelector(".charts").replaceWith(place);  // with its zoom
      }
    }
    charts = told.charts;
    at("written").textContent = told.written;
    at("said").textContent = told.over ? "The run has ended." : "";
    draw();
    if (told.over) return;
  } catch (error) {
    at("said").textContent = "No news: lockstep report --watch does not answer.";
  }
  setTimeout(news, 2000);
}

async function begin() {
  const packed = Uint8Array.from(atob(at("plotly").textContent), (sign) => sign.charCodeAt(0));
  const script = document.createElement("script");
  script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  document.head.append(script);
  at("controls").hidden = !charts.curves;
  at("controls").addEventListener("input", draw);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  draw();
  document.documentElement.dataset.drawn = "true";
  if (at("plotly").dataset.live) setTimeout(news, 2000);
}

if (at("plotly").textContent) begin();
