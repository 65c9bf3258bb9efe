(() => {
  const packs = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const NUM_COLOURS = 8;
  // Texts are those of the data: they only ever become text nodes and attributes.
  const el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(name, value);
    made.append(...children);
    return made;
  };
  const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0) + "%";
  const share = (part, whole) => percent(part / Math.max(1, whole));
  const colour = (at) => `var(--c${at % NUM_COLOURS + 1})`;
  const key = (pack) => `${pack.epoch}/${pack.number}`;
  const haystack = new Map();
  const text = (pack) => {
    if (!haystack.has(pack)) {
      haystack.set(pack, [...pack.members, ...pack.prefixes].flatMap((one) => [one.id || "", one.where || "", ...one.pieces.map((piece) => piece.text)])
        .join("\n").toLowerCase());
    }
    return haystack.get(pack);
  };

  let shown = packs, current = packs[0];

  const chosen = () => {
    const source = $("source").value, [low, high] = $("fill").value.split(",").map(Number);
    const wanted = $("find").value.trim().toLowerCase(), order = $("order").value;
    const found = packs.filter((pack) => pack.fill >= low && pack.fill < high
      && (!source || pack.members.some((one) => one.source === source))
      && (!wanted || text(pack).includes(wanted)));
    const name = order.replace("-", ""), sign = order.startsWith("-") ? -1 : 1;
    return order === "number" ? found : [...found].sort((a, b) => sign * (a[name] - b[name]));
  };

  const list = () => {
    shown = chosen();
    if (!shown.includes(current)) current = shown[0];
    $("count").textContent = `${shown.length} of ${packs.length} packs`;
    $("packs").replaceChildren(...shown.map((pack) => {
      const button = el("button", { type: "button", "data-key": key(pack) },
        el("span", { class: "line" }, el("span", {}, `Pack ${pack.number}`), el("span", {}, percent(pack.fill))),
        el("span", { class: "meter", "aria-hidden": "true" },
          el("span", { style: `width:${Math.min(100, 100 * pack.fill)}%` })),
        el("span", { class: "muted" }, `${pack.members.length} samples, ${share(pack.num_vision, pack.num_tokens)} vision`));
      button.addEventListener("click", () => show(pack));
      return el("li", {}, button);
    }));
    show(current);
  };

  // Inside of its list only: the page itself stays where the reader is.
  const reveal = (button) => {
    const box = $("packs"), from = button.offsetTop, to = from + button.offsetHeight;
    if (from < box.scrollTop) box.scrollTop = from;
    else if (to > box.scrollTop + box.clientHeight) box.scrollTop = to - box.clientHeight;
  };

  const show = (pack) => {
    current = pack;
    for (const button of $("packs").querySelectorAll("button")) {
      const isIt = pack !== undefined && button.dataset.key === key(pack);
      button.setAttribute("aria-current", isIt);
      if (isIt) reveal(button);
    }
    $("pack").replaceChildren(...(pack ? whole(pack) : [el("p", {}, "No pack is like that.")]));
  };

  const whole = (pack) => [
    el("h2", { id: "headline" }, `Epoch ${pack.epoch}, pack ${pack.number}`),
    el("p", {}, `${pack.num_tokens} of ${pack.packing_length} tokens (${percent(pack.fill)})`
      + (pack.prefixes.length ? ` for ${pack.num_tokens_alone} of the samples alone` : "") + `, ${pack.members.length} samples, `
      + `${share(pack.num_supervised, pack.num_tokens)} supervised, ${share(pack.num_vision, pack.num_tokens)} vision; rank ${pack.rank}`
      + (pack.step === null ? "" : `, step ${pack.step}`)),
    bar(pack),
    ...pack.left_out.map((line) => el("p", { class: "warn" }, `Left out: ${line.id}: ${line.reason}: ${line.error}`)),
    table(pack),
    el("p", { class: "legend", "aria-label": "Legend" }, ...Object.entries({
      prompt: "prompt", supervised: "supervised: trained", masked: "masked: of an answer, not trained", vision: "image tokens",
    }).map(([kind, said]) => el("span", { class: kind }, said))),
    ...units(pack).map(([prefix, members]) => prefix === null ? sample(...members[0])
      : el("div", { class: "unit" }, prefixSection(prefix, members), ...members.map((one) => sample(...one)))),
  ];

  // Samples as [sample, index], by unit: those of one prefix together, every other one alone.
  const units = (pack) => {
    const found = [];
    pack.members.forEach((one, at) => {
      const prefix = one.prefix === null ? null : pack.prefixes[one.prefix], last = found[found.length - 1];
      if (prefix !== null && last && last[0] === prefix) last[1].push([one, at]);
      else found.push([prefix, [[one, at]]]);
    });
    return found;
  };
  const prefixId = (members) => `p${members[0][1]}`;
  const rows = (members) => `${members.length} rows`;

  const bar = (pack) => el("div", { class: "bar", role: "group", "aria-label": "Samples to scale" },
    ...units(pack).flatMap(([prefix, members]) => [
      ...(prefix === null ? [] : [block(`prefix of ${rows(members)}: ${prefix.num_tokens} tokens`, prefixId(members), prefix.num_tokens)]),
      ...members.map(([one, at]) => block(`${one.id}: ${one.num_tokens} tokens`, `s${at}`, one.num_tokens, colour(at))),
    ]),
    el("span", { class: "free", style: `flex:${Math.max(0, pack.packing_length - pack.num_tokens)} 1 0` }));

  const block = (said, to, tokens, background = null) => el("a", {
    href: `#${to}`, title: said, "aria-label": said, class: background === null ? "prefix" : null,
    style: `flex:${tokens} 1 0` + (background === null ? "" : `;background:${background}`),
  });

  const table = (pack) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Samples of the pack" },
    el("table", { class: "members" },
      el("thead", {}, el("tr", {}, ...[["sample", ""], ["tokens", "n"], ["supervised", "n"], ["vision", "n"], ["images", "wide"]]
        .map(([name, of]) => el("th", { scope: "col", class: of }, name)))),
      el("tbody", {}, ...units(pack).flatMap(([prefix, members]) => [
        ...(prefix === null ? [] : [line(el("b", {}, chip(), el("a", { href: `#${prefixId(members)}` }, `prefix of ${rows(members)}`)),
          prefix, prefix.num_tokens, 0)]),
        ...members.map(([one, at]) => line(el("span", { class: prefix === null ? null : "branch" }, chip(colour(at)),
          el("a", { href: `#s${at}` }, one.id)), one, (prefix === null ? "" : "+ ") + one.num_tokens, one.num_supervised)),
      ]))));

  const chip = (background = null) => el("span", { class: background === null ? "chip prefix" : "chip",
    style: background === null ? null : `background:${background}`, "aria-hidden": "true" });

  const line = (name, one, tokens, supervised) => el("tr", {},
    el("td", {}, name), el("td", { class: "n" }, tokens), el("td", { class: "n" }, supervised),
    el("td", { class: "n" }, share(one.num_vision, one.num_tokens)),
    el("td", { class: "wide" }, one.pictures.map(pictureText).join(", ")));

  const prefixSection = (prefix, members) => el("section", { class: "sample prefix", id: prefixId(members), tabindex: "-1" },
    el("h3", {}, `Prefix of ${rows(members)}, computed once`),
    ...content(prefix));

  const sample = (one, at) => el("section", { class: "sample", id: `s${at}`, tabindex: "-1", style: `border-color:${colour(at)}` },
    el("h3", {}, one.id),
    el("p", { class: "muted mono" }, one.where),
    ...content(one));

  const positions = (one) => Object.entries(one.positions).map(([axis, [low, high]]) => `${axis} ${low}-${high}`).join(", ");
  const pictureText = (one) => one.kind + (one.width === null ? "" : ` ${one.width}x${one.height}`)
    + (one.num_tokens === null ? "" : ` = ${one.num_tokens} tokens`);
  const content = (one) => [
    el("p", { class: "muted" }, `tokens ${one.start}-${one.start + one.num_tokens - 1} of the sequence; positions: ${positions(one)}`),
    one.pictures.length ? el("ul", { class: "thumbs" }, ...one.pictures.map(picture)) : "",
    el("p", { class: "text" }, ...one.pieces.map((piece) =>
      el("span", { class: piece.kind, title: `${piece.kind}, ${piece.num_tokens} tokens` }, piece.text))),
  ];

  const picture = (one) => el("li", {}, el("figure", {},
    (one.thumbnail || "").startsWith("data:image/jpeg;base64,") ? el("img", { src: one.thumbnail, alt: "" }) : "",
    el("figcaption", { title: one.name }, pictureText(one))));

  const go = (by) => {
    const next = shown[shown.indexOf(current) + by];
    if (next) show(next);
  };

  for (const source of [...new Set(packs.flatMap((pack) => pack.members.map((one) => one.source)))].sort()) {
    $("source").append(el("option", { value: source }, source));
  }
  $("filters").addEventListener("input", list);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const keys = { ArrowRight: () => go(1), ArrowLeft: () => go(-1), j: () => go(1), k: () => go(-1), "/": () => $("find").focus() };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  list();
})();
