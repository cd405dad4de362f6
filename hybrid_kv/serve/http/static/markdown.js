// Markdown of a model as nodes of a page. All of its text goes in as text: HTML in it is shown as it
// is written, links show where they lead and lead nowhere, pictures are their words.
"use strict";

const DEEPEST = 12; // blocks in blocks; what is deeper is text
const LINE = {
  fence: /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/,
  heading: /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/,
  rule: /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/,
  quote: /^ {0,3}> ?/,
  item: /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(?=\S)/,
  columns: /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/,
};
// Bounded, so that a text of nothing but signs is read in a moment too.
const INLINE = new RegExp([
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<tick>`+)(?<code>[^`](?:[\s\S]{0,500}?[^`])?)\k<tick>(?!`)/,
  /\*\*(?=\S)(?<strong>[\s\S]{1,500}?)(?<=\S)\*\*/,
  /(?<![\w])__(?=\S)(?<strong2>[\s\S]{1,500}?)(?<=\S)__(?!\w)/,
  /\*(?=[^\s*])(?<em>[\s\S]{1,500}?)(?<=[^\s*])\*(?!\*)/,
  /(?<![\w])_(?=[^\s_])(?<em2>[\s\S]{1,500}?)(?<=[^\s_])_(?!\w)/,
  /~~(?=\S)(?<gone>[\s\S]{1,500}?)(?<=\S)~~/,
  /!?\[(?<label>[^\]\n]{0,500})\]\((?<url>[^\s()]{1,2000})(?:\s+"[^"\n]{0,500}")?\)/,
].map((one) => one.source).join("|"), "dg");
const STYLES = { strong: "strong", strong2: "strong", em: "em", em2: "em", gone: "del", code: "code" };

/** A piece of the source: `text`, and the place in the source of each of its characters. */
class Piece {
  constructor(text, places) { this.text = text; this.places = places; }
  static of(text) { return new Piece(text, Array.from(text.split(""), (_, place) => place)); }
  slice(begin, end) { return new Piece(this.text.slice(begin, end), this.places.slice(begin, end)); }
  trim() {
    const begin = this.text.length - this.text.trimStart().length;
    return this.slice(begin, Math.max(begin, this.text.trimEnd().length));
  }
  lines() {
    const found = [];
    let begin = 0;
    for (const line of this.text.split("\n")) {
      found.push(this.slice(begin, begin + line.length));
      begin += line.length + 1;
    }
    return found;
  }
  static joined(lines) {
    const places = [];
    for (const [number, line] of lines.entries()) {
      if (number) places.push(places.at(-1) ?? 0);
      for (const place of line.places) places.push(place);
    }
    return new Piece(lines.map((line) => line.text).join("\n"), places);
  }
}

/**
 * Nodes of a text.
 * @param marks [{begin, end, title}] places of the source, in order, that are wrapped in `span.doubt`.
 */
export function markdown(source, marks = []) {
  return new Renderer(marks).blocks(Piece.of(source).lines(), 0);
}

class Renderer {
  constructor(marks) { this.marks = marks; }

  blocks(lines, depth) {
    const made = [];
    let at = 0;
    while (at < lines.length) {
      const text = lines[at].text;
      if (!text.trim()) { at += 1; continue; }
      let found = null;
      if (depth < DEEPEST) {
        found = this.fence(lines, at) ?? this.heading(lines, at) ?? this.rule(lines, at)
          ?? this.quote(lines, at, depth) ?? this.list(lines, at, depth) ?? this.table(lines, at);
      }
      found ??= this.paragraph(lines, at, depth);
      made.push(found.node);
      at = found.next;
    }
    return made;
  }

  fence(lines, at) {
    const open = LINE.fence.exec(lines[at].text);
    if (!open) return null;
    let end = at + 1;
    const isEnd = (text) => text.trim().startsWith(open[1]) && !text.trim().replaceAll(open[1][0], "");
    while (end < lines.length && !isEnd(lines[end].text)) end += 1;
    const code = document.createElement("code");
    this.put(code, Piece.joined(lines.slice(at + 1, end)));
    return { node: wrapped("pre", code), next: end + 1 };
  }

  heading(lines, at) {
    const found = LINE.heading.exec(lines[at].text);
    if (!found) return null;
    const node = document.createElement(`h${Math.min(6, found[1].length + 3)}`);
    const begin = lines[at].text.indexOf(found[1]) + found[1].length;
    this.inline(node, lines[at].slice(begin).trim());
    return { node, next: at + 1 };
  }

  rule(lines, at) {
    return LINE.rule.test(lines[at].text) ? { node: document.createElement("hr"), next: at + 1 } : null;
  }

  quote(lines, at, depth) {
    let end = at;
    const inside = [];
    for (let found; end < lines.length && (found = LINE.quote.exec(lines[end].text)); end += 1) {
      inside.push(lines[end].slice(found[0].length));
    }
    if (end === at) return null;
    return { node: wrapped("blockquote", ...this.blocks(inside, depth + 1)), next: end };
  }

  list(lines, at, depth) {
    const first = LINE.item.exec(lines[at].text);
    if (!first) return null;
    const numbered = /\d/.test(first[2]);
    const node = document.createElement(numbered ? "ol" : "ul");
    if (numbered && parseInt(first[2], 10) !== 1) node.start = parseInt(first[2], 10);
    let end = at;
    while (end < lines.length) {
      const found = LINE.item.exec(lines[end].text);
      if (!found || /\d/.test(found[2]) !== numbered || found[1].length > first[1].length + 1) break;
      const indent = found[0].length, own = [lines[end].slice(indent)];
      for (end += 1; end < lines.length; end += 1) {
        const text = lines[end].text, deep = text.length - text.trimStart().length;
        if (!text.trim()) {
          const after = lines[end + 1]?.text ?? "";
          if (!after.trim() || after.length - after.trimStart().length < Math.min(indent, 2)) break;
          own.push(lines[end].slice(0, 0));
        } else if (deep >= Math.min(indent, first[1].length + 2)) {
          own.push(lines[end].slice(Math.min(deep, indent)));
        } else if (LINE.item.test(text) || this.begins(text)) break;
        else own.push(lines[end]);
      }
      node.append(wrapped("li", ...this.blocks(own, depth + 1)));
      while (end + 1 < lines.length && !lines[end].text.trim() && LINE.item.test(lines[end + 1].text)) end += 1;
    }
    return { node, next: end };
  }

  table(lines, at) {
    if (!lines[at].text.includes("|") || !LINE.columns.test(lines[at + 1]?.text ?? "")
      || !lines[at + 1].text.includes("|")) return null;
    const table = document.createElement("table");
    let end = at;
    for (; end < lines.length && lines[end].text.includes("|"); end += 1) {
      if (end === at + 1) continue;
      const row = table.insertRow();
      for (const cell of cells(lines[end])) {
        const place = document.createElement(end === at ? "th" : "td");
        this.inline(place, cell);
        row.append(place);
      }
    }
    return { node: Object.assign(wrapped("div", table), { className: "table" }), next: end };
  }

  paragraph(lines, at, depth) {
    let end = at + 1;
    while (end < lines.length && lines[end].text.trim()
      && (depth >= DEEPEST || !this.begins(lines[end].text))) end += 1;
    const node = document.createElement("p");
    this.inline(node, Piece.joined(lines.slice(at, end)));
    return { node, next: end };
  }

  begins(text) {
    return LINE.fence.test(text) || LINE.heading.test(text) || LINE.rule.test(text)
      || LINE.quote.test(text) || LINE.item.test(text);
  }

  inline(parent, piece) {
    let done = 0;
    for (const found of piece.text.matchAll(INLINE)) {
      this.put(parent, piece.slice(done, found.index));
      done = found.index + found[0].length;
      const { escaped, label, url } = found.groups;
      const part = (name) => piece.slice(...found.indices.groups[name]);
      if (escaped !== undefined) this.put(parent, part("escaped"));
      else if (url !== undefined) {
        if (label && label !== url) {
          this.inline(parent, part("label"));
          parent.append(" ");
        }
        const shown = Object.assign(document.createElement("span"), { className: "url" });
        this.put(shown, part("url"));
        parent.append(shown);
      } else {
        const name = Object.keys(STYLES).find((one) => found.groups[one] !== undefined);
        const node = document.createElement(STYLES[name]);
        if (name === "code") this.put(node, part(name));
        else this.inline(node, part(name));
        parent.append(node);
      }
    }
    this.put(parent, piece.slice(done));
  }

  /** Text, with its marks. */
  put(parent, piece) {
    const { text, places } = piece;
    let done = 0;
    while (done < text.length) {
      const mark = this.markOf(places[done]);
      let end = done + 1;
      while (end < text.length && this.markOf(places[end]) === mark) end += 1;
      const shown = text.slice(done, end);
      if (mark) {
        const properties = { className: "doubt", textContent: shown, title: mark.title };
        parent.append(Object.assign(document.createElement("span"), properties));
      } else parent.append(shown);
      done = end;
    }
  }

  /** The mark at a place of the source; null for none. */
  markOf(place) {
    let low = 0, high = this.marks.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.marks[middle].end <= place) low = middle + 1; else high = middle;
    }
    const mark = this.marks[low];
    return mark && mark.begin <= place ? mark : null;
  }
}

function wrapped(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function cells(line) {
  const found = [];
  let begin = line.text.trimStart().startsWith("|") ? line.text.indexOf("|") + 1 : 0;
  for (let at = begin; at <= line.text.length; at += 1) {
    const ends = at === line.text.length;
    if (!ends && (line.text[at] !== "|" || line.text[at - 1] === "\\")) continue;
    if (!ends || line.text.slice(begin).trim()) found.push(line.slice(begin, at).trim());
    begin = at + 1;
  }
  return found;
}
