// The figures: each takes a group and the lines to show, and gives Plotly's traces and layout, a sentence, and tables.

// Room for the points and their bars, but for bars no more than half of what the points span: two seeds give 12.7 standard errors
function limits(pairs) {
  const known = pairs.filter(([mean]) => mean !== null);
  const means = known.map(([mean]) => mean);
  const span = Math.max(Math.max(...means) - Math.min(...means), 0.2 * Math.max(...means.map(Math.abs)), 1e-9);
  const low = Math.min(...known.map(([mean, half]) => mean - Math.min(half, span / 2)));
  const high = Math.max(...known.map(([mean, half]) => mean + Math.min(half, span / 2)));
  return [low - 0.08 * span, high + 0.08 * span];
}

// 1, 2, 5 of each power of ten between the ends, or on a small screen over many of them the powers alone
function logAxis(low, high) {
  const from = Math.floor(Math.log10(low)),
    to = Math.ceil(Math.log10(high));
  const steps = to - from > 6 || (narrow() && to - from > 2) ? [1] : [1, 2, 5];
  const tickvals = Array.from({ length: to - from + 1 }, (_, i) => steps.map((n) => n * 10 ** (from + i))).flat();
  return {
    type: "log",
    range: [Math.log10(low), Math.log10(high)],
    tickvals,
    ticktext: tickvals.map((v) => String(+v.toPrecision(1))),
  };
}

function bars(stats, colour) {
  const [red, green, blue] = colourOf(colour)
    .match(/[0-9a-f]{2}/gi)
    .map((hex) => parseInt(hex, 16));
  return {
    type: "data",
    array: stats.map(([, half]) => half),
    thickness: 1.2,
    width: 0,
    color: `rgba(${red},${green},${blue},0.38)`,
  };
}

function frontierFigure(group, shown, latency) {
  const { index, label, unit } = LATENCIES[latency];
  const points = group.points.filter(
    (p) => shown.has(p.series) && stat(p, index)[0] !== null && stat(p, SOLVED)[0] !== null,
  );
  if (!points.length) {
    const figure = group.points.some((p) => stat(p, SOLVED)[0] !== null)
      ? null
      : barFigure(group, shown, index, label, unit);
    return (
      figure && {
        ...figure,
        caption:
          "This trace does not say which workflows are solved: latency alone, each policy at the middle of its taus.",
      }
    );
  }
  const same = (a, b, i) => Math.abs(stat(a, i)[0] - stat(b, i)[0]) <= 0.002 * Math.abs(stat(a, i)[0]);
  const sameSpot = (p) => {
    const others = points.filter((o) => o !== p && same(p, o, index) && same(p, o, SOLVED));
    return others.length ? `<br>Same place: ${plain(others.map(lineName).join(", "))}` : "";
  };
  const traces = [...new Set(points.map((p) => p.series))].map((series) => {
    const mine = points.filter((p) => p.series === series);
    const { name, colour, symbol } = data.series[series];
    const x = mine.map((p) => stat(p, index)),
      y = mine.map((p) => stat(p, SOLVED));
    const ends = mine.map((p, i) =>
      mine.length > 1 && (i === 0 || i === mine.length - 1) ? ` tau ${plain(p.tau)}` : "",
    );
    return {
      type: "scatter",
      mode: "lines+markers+text",
      name: plain(name),
      meta: { series },
      x: x.map(([m]) => m),
      y: y.map(([m]) => m),
      error_x: bars(x, colour),
      error_y: bars(y, colour),
      text: ends,
      textposition: "bottom right",
      hovertext: mine.map((p) => hover(p) + sameSpot(p)),
      textfont: { color: colourOf(colour), size: 12 },
      hoverinfo: "text",
      line: { color: colourOf(colour), width: 1.8 },
      marker: {
        symbol: mine.map((p) => symbol + (p.steady ? "" : "-open")),
        size: 11,
        color: colourOf(colour),
        line: { width: 1.6, color: mine.map((p) => (p.steady ? css("--paper") : colourOf(colour))) },
      },
    };
  });
  const best = points.filter((p) => p.best[latency]);
  traces.push({
    type: "scatter",
    mode: "markers",
    name: "not dominated",
    x: best.map((p) => stat(p, index)[0]),
    y: best.map((p) => stat(p, SOLVED)[0]),
    hoverinfo: "skip",
    marker: { symbol: "circle-open", size: 21, color: css("--soft"), line: { width: 1.4 } },
  });
  const xs = points.map((p) => stat(p, index)),
    values = xs.map(([m]) => m);
  const log = Math.min(...values) > 0 && Math.max(...values) > 10 * Math.min(...values);
  const [left, right] = limits(xs),
    [low, high] = limits(points.map((p) => stat(p, SOLVED)));
  const x = log ? logAxis(Math.min(...values) / 1.5, Math.max(...values) * 1.8) : { range: [Math.max(left, 0), right] };
  return {
    traces,
    layout: layout({
      xaxis: axis(label, x),
      yaxis: axis("solved (%)", { range: [Math.max(low, -2), Math.min(high, 102)] }),
    }),
    sentence:
      `${label} against solved rate: ${points.length} points. Not dominated: ` +
      (best
        .map((p) => `${lineName(p)} (${fmt(stat(p, index)[0])} ${unit}, ${fmt(stat(p, SOLVED)[0])} % solved)`)
        .join("; ") || "none of those shown") +
      ".",
    caption:
      "Up and to the left is better. Bars are 95 % intervals over the seeds. A ring marks what no other point of this workload and combination beats, shown or not; a hollow marker a run whose backlog still grew at the last arrival. Numbers at line ends are the policy’s tau.",
    ...pointTable(points, latency),
  };
}

function pointTable(points, latency) {
  const head = ["policy", "tau", "mean s", "p99 s", "ms a token", "solved %", "queue s", "seeds", "notes"];
  const rows = points.map((p) => [
    data.series[p.series].name,
    p.tau ?? "",
    ...[MEAN, P99, PER_TOKEN, SOLVED, QUEUE].map((i) => withHalf(stat(p, i), p)),
    p.seeds.length,
    [p.best[latency] && "not dominated", !p.steady && "not steady", p.rejected && `${p.rejected} rejected`]
      .filter(Boolean)
      .join(", "),
  ]);
  const axes = [...new Set(points.flatMap((p) => Object.keys(p.config)))];
  const csv = [
    ["series", ...axes, ...data.metrics.flatMap((m) => [m, `${m}_half_interval`]), "seeds", "steady", "rejected"],
    ...points.map((p) => [
      data.series[p.series].name,
      ...axes.map((a) => p.config[a] ?? ""),
      ...p.stats.flat().map((v) => v ?? ""),
      p.seeds.join(" "),
      p.steady,
      p.rejected,
    ]),
  ];
  return { table: [head, ...rows], csv };
}

function barFigure(group, shown, index, label, unit) {
  const points = group.points.filter((p) => p.middle && shown.has(p.series) && stat(p, index)[0] !== null).reverse();
  if (!points.length) return null;
  const most = narrow() ? 18 : 42;
  const cut = (text) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  const values = points.map((p) => stat(p, index));
  const top = Math.max(...values.map(([m]) => m));
  return {
    traces: [
      {
        type: "bar",
        orientation: "h",
        x: values.map(([m]) => m),
        y: points.map((_, i) => i),
        hovertext: points.map(hover),
        hoverinfo: "text",
        name: "bars",
        marker: { color: points.map((p) => colourOf(data.series[p.series].colour)) },
        text: values.map(([m]) => ` ${fmt(m)}`),
        textposition: "none",
        error_x: {
          type: "data",
          symmetric: false,
          array: values.map(([, h]) => h),
          arrayminus: values.map(([m, h]) => Math.min(m, h)),
          color: css("--soft"),
          thickness: 1.4,
          width: 4,
        },
      },
    ],
    layout: layout({
      bargap: 0.38,
      xaxis: axis(label, {
        range: [0, Math.max(Math.min(Math.max(...values.map(([m, h]) => m + h)), 1.6 * top), 1e-6) * 1.05],
      }),
      yaxis: axis("", {
        tickmode: "array",
        tickvals: points.map((_, i) => i),
        ticktext: points.map((p) => plain(cut(lineName(p)))),
        gridcolor: "rgba(0,0,0,0)",
        range: [-0.6, points.length - 0.4],
      }),
    }),
    height: 100 + 46 * points.length,
    sentence: `${label}: ${points
      .slice()
      .reverse()
      .map((p) => `${lineName(p)} ${withHalf(stat(p, index), p)} ${unit}`)
      .join("; ")}.`,
    ...pointTable(points.slice().reverse(), 0),
  };
}

function queueFigure(group, shown) {
  const figure = barFigure(
    group,
    shown,
    QUEUE,
    narrow() ? "mean queue time (s)" : "mean queue time of a request (s)",
    "s",
  );
  return (
    figure && {
      ...figure,
      caption:
        "From when a request is ready to when it is in an engine’s batch, each policy at the middle of its taus. Bars are 95 % intervals over the seeds, cut at the figure’s edge.",
    }
  );
}

function cdfFigure(group, shown) {
  const lines = group.details.filter((d) => shown.has(d.series) && d.quantiles.length);
  if (!lines.length) return null;
  const share = (line, i) => (100 * i) / (line.quantiles.length - 1);
  const ends = lines.map((line) => line.quantiles.at(-1));
  const least = Math.max(Math.min(...lines.map((line) => line.quantiles[0])), Math.max(...ends) / 1e5, 1e-6);
  const at = (line, q) => line.quantiles[Math.round(q * (line.quantiles.length - 1))];
  return {
    traces: lines.map((line) => {
      const { colour, dash, symbol } = data.series[line.series];
      return {
        type: "scatter",
        mode: "lines+markers",
        name: plain(lineName(line)),
        meta: { series: line.series },
        x: line.quantiles,
        y: line.quantiles.map((_, i) => share(line, i)),
        line: { color: colourOf(colour), width: 2, dash },
        marker: { symbol, size: 8, color: colourOf(colour), maxdisplayed: 8 },
        hovertemplate: `<b>${plain(lineName(line))}</b><br>%{y:.0f} % within %{x:.3~g} s<extra></extra>`,
      };
    }),
    layout: layout({
      xaxis: axis("workflow latency (s)", logAxis(least / 1.2, Math.max(...ends) * 1.2)),
      yaxis: axis("workflows (%)", { range: [-2, 102] }),
    }),
    sentence: `Share of workflows done within a latency. Median and 99th percentile: ${lines.map((l) => `${lineName(l)} ${fmt(at(l, 0.5))} and ${fmt(at(l, 0.99))} s`).join("; ")}.`,
    caption: "All seeds together, each policy at the middle of its taus. Time is on a logarithmic scale.",
    table: [
      ["policy", "tau", "workflows", "p10 s", "p50 s", "p90 s", "p99 s", "longest s"],
      ...lines.map((l) => [
        data.series[l.series].name,
        l.tau ?? "",
        l.workflows,
        ...[0.1, 0.5, 0.9, 0.99, 1].map((q) => fmt(at(l, q))),
      ]),
    ],
    csv: [
      ["series", "tau", "share_percent", "latency_s"],
      ...lines.flatMap((l) =>
        l.quantiles.map((v, i) => [data.series[l.series].name, l.tau ?? "", share(l, i).toFixed(3), v]),
      ),
    ],
  };
}

function loadFigure(detail) {
  if (!detail || !detail.load.engines.length) return null;
  const { step_s: step, engines } = detail.load;
  const models = [...new Set(engines.map((e) => e.model))];
  const dashes = ["solid", "dash", "dot", "dashdot"];
  const mean = (values) => values.reduce((sum, v) => sum + v, 0) / Math.max(values.length, 1);
  const traces = engines.flatMap((engine) => {
    const colour = colourOf(data.palette[models.indexOf(engine.model) % data.palette.length]);
    const dash = dashes[engines.filter((e) => e.model === engine.model).indexOf(engine) % dashes.length];
    return ["running", "waiting"].map((what, row) => ({
      type: "scatter",
      mode: "lines",
      name: plain(engine.engine),
      legendgroup: engine.engine,
      showlegend: row === 0,
      x: engine[what].map((_, i) => +((i + 0.5) * step).toFixed(3)),
      y: engine[what],
      yaxis: row ? "y2" : "y",
      line: { color: colour, width: 1.7, dash },
      hovertemplate:
        `<b>${plain(engine.engine)}</b><br>${what} %{y:.3~g} of ${engine.slots} slots<br>at %{x:.3~g} s<extra></extra>`.replace(
          row ? ` of ${engine.slots} slots` : "\0",
          "",
        ),
    }));
  });
  const small = narrow();
  return {
    traces,
    layout: layout({
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: css("--ink"), size: 12 } },
      margin: { l: small ? 44 : 60, r: 14, t: 20, b: 50 },
      xaxis: axis("time (s)", { anchor: "y2" }),
      yaxis: axis("running", { domain: [0.46, 1], rangemode: "tozero" }),
      yaxis2: axis("waiting", { domain: [0, 0.36], rangemode: "tozero" }),
    }),
    height: 430 + (small ? 12 * engines.length : 0),
    sentence: `Running and waiting requests of each engine over time under ${lineName(detail)}, seed ${detail.seed}. On average: ${engines.map((e) => `${e.engine} ${fmt(mean(e.running))} running, ${fmt(mean(e.waiting))} waiting`).join("; ")}.`,
    caption: `Requests in the engines’ batches, and those that wait for a place; means over ${fmt(step)} s. One seed (${detail.seed}). The picture ends where fewer than 3 % of the most requests are left.`,
    table: [
      ["engine", "slots", "mean running", "most running", "mean waiting", "most waiting"],
      ...engines.map((e) => [
        e.engine,
        e.slots,
        fmt(mean(e.running)),
        fmt(Math.max(...e.running)),
        fmt(mean(e.waiting)),
        fmt(Math.max(...e.waiting)),
      ]),
    ],
    csv: [
      ["engine", "time_s", "running", "waiting"],
      ...engines.flatMap((e) => e.running.map((v, i) => [e.engine, ((i + 0.5) * step).toFixed(3), v, e.waiting[i]])),
    ],
  };
}
