// The page around the figures: controls, tables, downloads, the slowest workflows, and colours for screen and print.

const state = { at: [], shown: new Set(data.series.keys()), latency: 0, one: 0 };
const element = (name, properties, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};
const group = () => data.groups.find((g) => g.at.every((value, i) => value === state.at[i]));
const shownWords = () => data.pickers.map((p, i) => p.values[state.at[i]]).join(", ");

function fill(id, figure, empty) {
  const root = document.getElementById(id),
    plot = root.querySelector(".plot");
  root.querySelector("figcaption").textContent = figure?.caption ?? "";
  const open = root.querySelector("details")?.open ?? false;
  root.querySelector("details")?.remove();
  plot.setAttribute("role", "img");
  if (!figure) {
    Plotly.purge(plot);
    plot.style.height = "auto";
    plot.setAttribute("aria-label", empty);
    plot.replaceChildren(element("p", { className: "none", textContent: empty }));
    return;
  }
  plot.querySelector(".none")?.remove();
  const sentence = `${shownWords()}. ${figure.sentence}`;
  plot.setAttribute("aria-label", sentence.charAt(0).toUpperCase() + sentence.slice(1));
  const size = printing ? { width: 660, height: figure.height ?? 330 } : { autosize: true };
  plot.style.height = figure.height || printing ? `${size.height ?? figure.height}px` : "";
  Plotly.react(
    plot,
    figure.traces,
    { ...figure.layout, ...size },
    {
      responsive: true,
      displaylogo: false,
      doubleClick: "reset",
      // named one by one: the default ones of Plotly include an upload
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]],
      plotlyServerURL: "",
      displayModeBar: matchMedia("(pointer: coarse)").matches ? false : "hover",
      toImageButtonOptions: { format: "svg", filename: id },
    },
  );
  const details = element("details", { open }, element("summary", { textContent: "The same as a table" }));
  details.append(
    scrolled(tableOf(figure.table), "The figure’s data"),
    button("Download CSV", () => download(`${id}.csv`, figure.csv)),
  );
  root.append(details);
}

function tableOf([head, ...rows]) {
  const numeric = head.map((_, i) => i > 0 && rows.every((row) => row[i] === "" || /^[\d.–-]/.test(String(row[i]))));
  const cell = (value, i, name) =>
    element(name, { textContent: value, className: numeric[i] ? "n" : "", ...(name === "th" && { scope: "col" }) });
  const body = rows.map((row) =>
    element(
      "tr",
      {},
      ...row.map((value, i) => (i ? cell(value, i, "td") : element("th", { textContent: value, scope: "row" }))),
    ),
  );
  return element(
    "table",
    { className: "data" },
    element("thead", {}, element("tr", {}, ...head.map((value, i) => cell(value, i, "th")))),
    element("tbody", {}, ...body),
  );
}

function scrolled(table, label) {
  const region = element("div", { className: "scroll", tabIndex: 0 }, table);
  region.setAttribute("role", "region");
  region.setAttribute("aria-label", label);
  return region;
}

function button(text, act) {
  const made = element("button", { type: "button", textContent: text });
  made.addEventListener("click", act);
  return made;
}

function download(name, rows) {
  const quoted = (value) => (/[",\n\r]/.test(String(value)) ? `"${String(value).replace(/"/g, '""')}"` : String(value));
  const url = URL.createObjectURL(
    new Blob([rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n"], { type: "text/csv" }),
  );
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function workflowBlock(workflow) {
  const solved = workflow.solved === null ? "" : workflow.solved ? ", solved" : ", not solved";
  const more =
    workflow.stages > workflow.calls.length ? ` The first ${workflow.calls.length} of ${workflow.stages} stages:` : "";
  const queue = workflow.calls.reduce((sum, call) => sum + call[5] - call[4], 0);
  const block = element(
    "div",
    { className: "workflow" },
    element("h3", { textContent: workflow.id }),
    element("p", {
      textContent: `${fmt(workflow.latency_s)} s, ${fmt(workflow.slowdown)} times as long as alone on an idle engine; ${fmt(queue)} s waiting${solved}.${more}`,
    }),
  );
  for (const [name, engine, out, ready, sent, admitted, first, end] of workflow.calls) {
    const track = element("div", { className: "track" });
    const parts = [
      ["predictor", ready, sent],
      ["waiting", sent, admitted],
      ["prefill", admitted, first],
      ["decode", first, end],
    ].filter(([, from, to]) => to > from);
    for (const [part, from, to] of parts) {
      const span = element("div", { className: `span ${part}`, title: `${part} ${fmt(to - from)} s` });
      span.style.left = `${(100 * from) / workflow.latency_s}%`;
      span.style.width = `${(100 * (to - from)) / workflow.latency_s}%`;
      track.append(span);
    }
    track.setAttribute("role", "img");
    track.setAttribute(
      "aria-label",
      `${name} on ${engine}, from ${fmt(ready)} s: ${parts.map(([part, from, to]) => `${part} ${fmt(to - from)} s`).join(", ")}${out ? `; ${out} times out of the batch` : ""}`,
    );
    block.append(
      element(
        "div",
        { className: "stage" },
        element(
          "div",
          { className: "name" },
          `${name} `,
          element("small", { textContent: engine + (out ? `, ${out} × out of the batch` : "") }),
        ),
        track,
      ),
    );
  }
  block.append(
    element(
      "div",
      { className: "ends" },
      element("span", { textContent: "arrival" }),
      element("span", { textContent: `${fmt(workflow.latency_s)} s` }),
    ),
  );
  return block;
}

function fillSlowest(detail) {
  const root = document.getElementById("slowest"),
    place = root.querySelector(".workflows");
  root.querySelector(".key").hidden = !detail?.slowest.length;
  if (!detail?.slowest.length) {
    place.replaceChildren(element("p", { className: "none", textContent: "No workflows for this choice." }));
    root.querySelector("figcaption").textContent = "";
    root.querySelector("details")?.remove();
    return;
  }
  place.replaceChildren(...detail.slowest.map(workflowBlock));
  root.querySelector("figcaption").textContent =
    `The ${detail.slowest.length} longest of seed ${detail.seed} under ${lineName(detail)}. Decode counts until the last token, time out of the batch after a preemption or a yield included; gaps are tools and users.`;
  root.querySelector("details")?.remove();
  const head = [
    "workflow",
    "stage",
    "engine",
    "out_of_batch",
    "ready_s",
    "sent_s",
    "admitted_s",
    "first_token_s",
    "end_s",
  ];
  const rows = detail.slowest.flatMap((w) => w.calls.map((call) => [w.id, ...call]));
  const details = element(
    "details",
    {},
    element("summary", { textContent: "The same as a table" }),
    scrolled(tableOf([head, ...rows]), "The stages’ data"),
  );
  details.append(button("Download CSV", () => download("slowest.csv", [head, ...rows])));
  root.append(details);
}

function draw() {
  const now = group();
  for (const place of document.querySelectorAll(".shown"))
    place.textContent = shownWords() + (now ? "" : " (not here)");
  const none = now
    ? "Nothing to show for the policies chosen."
    : "These choices were not run together, or had no room on this page.";
  const shown = now ?? { points: [], details: [] };
  const missing =
    now && !now.details.length ? "Left out of this page for this workload, to keep the file small." : none;
  fill("frontier", shown.points.length ? frontierFigure(shown, state.shown, state.latency) : null, none);
  fill("queue", queueFigure(shown, state.shown), none);
  fill("cdf", cdfFigure(shown, state.shown), missing);
  for (const select of document.querySelectorAll("select.one")) {
    select.replaceChildren(
      ...shown.details.map((d) => element("option", { value: d.series, textContent: lineName(d) })),
    );
    select.closest("label").hidden = !shown.details.length;
    if (shown.details.length && !shown.details.some((d) => d.series === state.one))
      state.one = shown.details.at(-1).series;
    select.value = state.one;
  }
  const detail = shown.details.find((d) => d.series === state.one);
  fill("load", loadFigure(detail), missing);
  fillSlowest(detail);
}

function colourChips() {
  for (const [i, svg] of document.querySelectorAll("#policies svg").entries())
    svg.setAttribute("fill", colourOf(data.series[i].colour));
}

function controls() {
  state.at = [...data.groups[0].at];
  state.one = data.series.length - 1;
  for (const [i, picker] of data.pickers.entries()) {
    const select = element(
      "select",
      { name: picker.name, autocomplete: "off" },
      ...picker.values.map((text, value) => element("option", { value, textContent: text })),
    );
    select.value = state.at[i];
    select.disabled = picker.values.length < 2;
    select.addEventListener("change", () => {
      state.at[i] = Number(select.value);
      draw();
    });
    document.getElementById("pickers").append(element("label", { className: "picker" }, picker.label, select));
  }
  for (const [i, { name, symbol }] of data.series.entries()) {
    const box = element("input", { type: "checkbox", checked: true, name: "policy", value: i, autocomplete: "off" });
    box.addEventListener("change", () => {
      state.shown[box.checked ? "add" : "delete"](i);
      draw();
    });
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    mark.setAttribute("viewBox", "0 0 16 16");
    mark.setAttribute("aria-hidden", "true");
    mark.innerHTML = SHAPES[symbol];
    document
      .getElementById("policies")
      .append(element("label", { className: "chip" }, box, mark, element("span", { textContent: name })));
  }
  for (const [i, { name }] of LATENCIES.entries()) {
    const radio = element("input", { type: "radio", name: "latency", value: i, checked: i === 0, autocomplete: "off" });
    radio.addEventListener("change", () => {
      state.latency = i;
      draw();
    });
    document.getElementById("latencies").append(element("label", {}, radio, name));
  }
  for (const select of document.querySelectorAll("select.one"))
    select.addEventListener("change", () => {
      state.one = Number(select.value);
      draw();
    });
}

function redraw() {
  colourChips();
  draw();
}

controls();
redraw();
document.getElementById("provenance").textContent = JSON.stringify(data.provenance, null, 2);
document.getElementById("copy")?.addEventListener("click", async () => {
  const place = document.getElementById("command"),
    said = document.getElementById("copied");
  try {
    await navigator.clipboard.writeText(place.textContent);
    said.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(place);
    said.textContent = "Selected: copy it with your keyboard.";
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let wasNarrow = narrow();
addEventListener("resize", () => {
  if (wasNarrow !== narrow()) {
    wasNarrow = narrow();
    draw();
  }
});
addEventListener("beforeprint", () => {
  printing = true;
  redraw();
});
addEventListener("afterprint", () => {
  printing = false;
  redraw();
});
