// A job's page while it is open: the map of ranks and time, the curve under it, and the newest figures.
// The server sums up; here it is only drawn. Everything of the user's data goes in by textContent.
"use strict";
(() => {
  const facts = document.getElementById("facts"), job = facts.dataset.job;
  const canvas = document.getElementById("map"), metric = document.getElementById("metric"), out = document.getElementById("out");
  const told = document.getElementById("cell"), table = document.querySelector("#rows tbody");
  const FRESH_MS = 5000, ROW_PX = 3, MOST_PX = 640;
  let shown = null, range = null, at = { row: 0, column: 0 }, later = 0, loading = false, again = false;

  const short = (value) => value === null || value === undefined ? "" : Number(value.toPrecision(4)).toString();
  const withUnit = (value) => value === null || value === undefined ? "nothing" : `${short(value)} ${shown.unit}`.trim();

  async function load() {
    if (loading) { again = true; return; }  // what is asked for meanwhile must not be lost
    loading = true;
    clearTimeout(later);
    const asked = new URLSearchParams({ metric: metric.value });
    if (range) { asked.set("first", range.first); asked.set("last", range.last); }
    try {
      const answer = await fetch(`/jobs/${job}/heat?${asked}`);
      if (answer.ok) { shown = await answer.json(); draw(); }
      else { told.textContent = `the map could not be loaded (${answer.status})`; }
    } catch { told.textContent = "the daemon does not answer"; }
    loading = false;
    if (again) { again = false; load(); return; }
    if (!ended()) { later = setTimeout(load, FRESH_MS); }
  }

  // From the typical value (cold) to twice of it or the highest (hot): a slow rank shows, noise does not. Loss: from lowest to highest.
  function heat(value) {
    const low = shown.metric === "loss" ? shown.low : shown.typical;
    const high = Math.max(shown.high, shown.metric === "loss" ? shown.low : 2 * shown.typical);
    return high > low ? Math.min(1, Math.max(0, (value - low) / (high - low))) : 0;
  }
  const COLD = [38, 84, 124], WARM = [239, 176, 40], HOT = [207, 34, 46];
  function colour(share) {
    const [from, to, part] = share < 0.5 ? [COLD, WARM, share * 2] : [WARM, HOT, share * 2 - 1];
    return from.map((start, index) => Math.round(start + (to[index] - start) * part));
  }

  function draw() {
    const rows = shown.rows.length, columns = rows ? shown.cells[0].length : 0;
    out.disabled = range === null;
    document.getElementById("scale").textContent = rows ? `${withUnit(shown.low)} to ${withUnit(shown.high)}, ${short(shown.column_s)} s a column` : "";
    canvas.width = Math.max(1, columns);
    canvas.height = Math.max(1, rows);
    canvas.style.height = `${Math.min(MOST_PX, Math.max(40, rows * Math.max(ROW_PX, Math.min(24, 240 / Math.max(1, rows)))))}px`;
    at = { row: Math.min(at.row, Math.max(0, rows - 1)), column: Math.min(at.column, Math.max(0, columns - 1)) };
    paint();
    fill();
    curve();
  }

  function paint() {
    const context = canvas.getContext("2d"), rows = shown.rows.length, columns = canvas.width;
    const image = context.createImageData(columns, canvas.height);
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const value = shown.cells[row][column];
        if (value === null || value === undefined) { continue; }
        const place = 4 * (row * columns + column);
        image.data.set([...colour(heat(value)), 255], place);
      }
    }
    context.putImageData(image, 0, 0);
    if (document.activeElement === canvas && rows) {
      context.fillStyle = getComputedStyle(document.body).color;
      context.fillRect(at.column, at.row, 1, 1);
    }
  }

  const newest = (cells) => { for (let i = cells.length - 1; i >= 0; i--) { if (cells[i] !== null) { return cells[i]; } } return null; };
  const highest = (cells) => cells.reduce((most, value) => value !== null && (most === null || value > most) ? value : most, null);

  function fill() {
    const order = shown.rows.map((row, index) => ({ row, newest: newest(shown.cells[index]), highest: highest(shown.cells[index]) }));
    order.sort((one, two) => (two.newest ?? -Infinity) - (one.newest ?? -Infinity));
    table.replaceChildren(...order.map(({ row, newest, highest }) => {
      const line = document.createElement("tr"), name = document.createElement("th");
      name.scope = "row";
      name.textContent = row.label + (row.first === row.last ? "" : `, ranks ${row.first} to ${row.last}`);
      const cells = [withUnit(newest), withUnit(highest)].map((text) => { const cell = document.createElement("td"); cell.textContent = text; return cell; });
      const link = document.createElement("a"), last = document.createElement("td");
      link.textContent = "look into";
      link.setAttribute("aria-label", `look into ${row.label}`);
      link.href = row.first === row.last ? `/jobs/${job}/ranks/${row.first}` : `#ranks-${row.first}-${row.last}`;
      last.append(link);
      line.append(name, ...cells, last);
      return line;
    }));
  }

  function make(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) { made.setAttribute(key, value); }
    if (text !== undefined) { made.textContent = text; }
    return made;
  }

  function curve() {
    const box = document.getElementById("curve"), { low, middle, high } = shown.series;
    const known = middle.map((value, index) => value === null ? -1 : index).filter((index) => index >= 0);
    if (!known.length) { box.replaceChildren("nothing yet"); return; }
    const least = Math.min(...known.map((index) => low[index])), most = Math.max(...known.map((index) => high[index]), least + Math.abs(least) * 0.01 + 1e-9);
    const x = (index) => (index + 0.5) / middle.length * 1000, y = (value) => 16 + (most - value) / (most - least) * 184;
    const words = `${shown.title}: lowest ${withUnit(least)}, highest ${withUnit(most)}, newest mean ${withUnit(middle[known.at(-1)])}`;
    const picture = make("svg", { class: "curve", role: "img", "aria-label": words, height: 220 });
    const plot = make("svg", { viewBox: "0 0 1000 200", preserveAspectRatio: "none", width: "100%", height: 200, overflow: "visible" });
    const levels = [least, (least + most) / 2, most];
    plot.append(...levels.map((level) => make("path", { class: "grid", d: `M0 ${y(level)}H1000` })));
    const area = [...known.map((index) => `${x(index)},${y(high[index])}`), ...known.toReversed().map((index) => `${x(index)},${y(low[index])}`)];
    const line = known.map((index) => `${x(index)} ${y(middle[index])}`);  // of one point it would be nothing: that is a dot
    plot.append(make("polygon", { class: "band", points: area.join(" ") }));
    plot.append(make("path", line.length > 1 ? { class: "line", d: `M${line.join("L")}` } : { class: "line dot", d: `M${line[0]}h0` }));
    picture.append(plot, ...levels.map((level) => make("text", { y: y(level) - 3 }, withUnit(level))));
    picture.append(make("text", { y: 215 }, when(0)), make("text", { x: "100%", y: 215, "text-anchor": "end" }, when(middle.length - 1)));
    box.replaceChildren(picture);
  }

  function when(column) {
    const before = Math.round((canvas.width - 1 - column) * shown.column_s);
    return ended() ? (before ? `${before} s before the end` : "the end") : before ? `${before} s ago` : "now";
  }

  function tell() {
    if (!shown || !shown.rows.length) { return; }
    const row = shown.rows[at.row], value = shown.cells[at.row][at.column];
    told.textContent = `${row.label}, ${when(at.column)}: ${withUnit(value)}` + (row.first === row.last ? "" : ` (the highest of ranks ${row.first} to ${row.last})`);
  }

  function into(row) {
    if (row.first === row.last) { location.href = `/jobs/${job}/ranks/${row.first}`; return; }
    location.hash = `ranks-${row.first}-${row.last}`;
  }

  function zoomed() {
    const found = /^#ranks-(\d{1,9})-(\d{1,9})$/.exec(location.hash);
    range = found ? { first: Number(found[1]), last: Number(found[2]) } : null;
    at = { row: 0, column: at.column };
    load();
  }

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    at = {
      row: Math.max(0, Math.min(canvas.height - 1, Math.floor((event.clientY - box.top) / box.height * canvas.height))),
      column: Math.max(0, Math.min(canvas.width - 1, Math.floor((event.clientX - box.left) / box.width * canvas.width))),
    };
    tell();
  };
  canvas.addEventListener("mousemove", place);
  canvas.addEventListener("click", (event) => { place(event); if (shown && shown.rows.length) { into(shown.rows[at.row]); } });
  canvas.addEventListener("focus", () => { if (shown) { paint(); tell(); } });
  canvas.addEventListener("blur", () => { if (shown) { paint(); } });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!shown || !shown.rows.length) { return; }
    if (by) {
      at = { row: Math.max(0, Math.min(canvas.height - 1, at.row + by[0])), column: Math.max(0, Math.min(canvas.width - 1, at.column + by[1])) };
      paint();
      tell();
    } else if (event.key === "Enter") { into(shown.rows[at.row]); } else if (event.key === "Escape" && range) { location.hash = ""; } else { return; }
    event.preventDefault();
  });
  out.addEventListener("click", () => { location.hash = ""; });
  metric.addEventListener("change", load);
  window.addEventListener("hashchange", zoomed);

  const ended = () => facts.querySelector('[data-fact="state"]').textContent.startsWith("ended");
  const set = (name, text) => { facts.querySelector(`[data-fact="${name}"]`).textContent = text; };
  function follow() {
    const stream = new EventSource(`/jobs/${job}/live`), before = Number(facts.querySelector('[data-fact="incidents"]').textContent);
    stream.addEventListener("message", (event) => {
      const now = JSON.parse(event.data);
      set("state", now.exit_code === null ? now.state : `${now.state}, exit code ${now.exit_code}`);
      set("step", now.last_step ?? "none yet");
      set("updates", now.updates ?? "");
      set("alive", `${now.alive} of ${now.ranks}`);
      set("slowest", now.slowest_s === null ? "" : `${short(now.slowest_s * 1000)} ms`);
      set("standstill", now.standstill || "none");
      set("incidents", now.incidents);
      const more = now.incidents - before, news = document.getElementById("news");
      if (more > 0 && !news.dataset.told) {
        const link = document.createElement("a");
        link.href = location.pathname;
        link.textContent = "there is news: load them";
        news.replaceChildren(link);
        news.dataset.told = "yes";
      }
      if (now.state === "ended") { stream.close(); load(); }
    });
  }
  zoomed();
  if (!ended()) { follow(); }
})();
