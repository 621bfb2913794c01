"""What the daemon's answers look like on a terminal: statistics, trees, the live view; made for 80 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiercache.service.demo.screen import COLOURS, TIERS
from tiercache.sizes import format_size
from tiercache.types import Tier

Found = Mapping[str, Any]
"""What the daemon answered: an object of JSON."""

_STYLES = {str(tier): COLOURS[tier] for tier in TIERS}
_TAG = re.compile(r"\[(\w+)\]")
_RAILS = re.compile(r"[│├└─ ]*")
_MOST_SESSIONS = 8
_MOST_REASONS = 6


def plain_table(first: str, *rest: str, left: Iterable[str] = ()) -> Table:
    """Return a table without lines; all columns but the first and those in `left` hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def share(part: float, whole: float) -> str:
    """Return a fraction as people read it: `75 %`, or a dot where there is nothing to divide by."""
    return f"{part / whole:.0%}".replace("%", " %") if whole else "·"


def span(seconds: float) -> str:
    """Return a time as `2 d 03:04:05`."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour:02}:{minute:02}:{second:02}"


def many(count: int, name: str) -> str:
    """Return `1 block`, `2 blocks`."""
    return f"{count} {name}{'' if count == 1 else 's'}"


# --- statistics -----------------------------------------------------------------------------------------------------------


def stats_view(found: Found) -> Group:
    """Return all counts as tables."""
    counts = found["counts"]
    parts: list[RenderableType] = [
        _head(found),
        *_reasons(found["health"], most=len(found["health"]["reasons"])),
        Text(
            f"{counts['sessions']} sessions in all, {sum(counts['requests'].values())} requests, "
            f"{sum(counts['failures'].values())} refused",
            style="dim",
        ),
    ]
    if found["kept_back"]:
        parts.append(Text(f"{many(found['kept_back'], 'session')} ended whose processes may still touch blocks", style="yellow"))
    for stack in found["stacks"]:
        parts += ["", *_stack(stack)]
    if not found["stacks"]:
        parts += ["", Text("No model has opened a namespace yet.")]
    if found["workers"]:
        parts += ["", _workers(found["workers"])]
    if found["disk"] is not None:
        parts.append(_disk(found["disk"]))
    if counts["failures"]:
        table = plain_table("refused", "requests")
        for name, count in counts["failures"].items():
            table.add_row(name, str(count))
        parts += ["", table]
    if found["sessions"]:
        parts += ["", _sessions(found["sessions"])]
    return Group(*parts)


def _head(found: Found) -> Text:
    line = Text()
    well = found["status"] == "serving" and found["health"]["status"] == "ok"
    line.append(str(found["status"]), style="green" if well else "yellow")
    line.append(f" for {span(found['seconds'])}, {many(len(found['sessions']), 'session')} now")
    if found["health"]["reasons"]:
        line.append(f", {found['health']['status']}", style="bold yellow")
    return line


def _reasons(health: Found, *, most: int) -> list[Table | Text]:
    """Return what ails the daemon: since when, by which code, and in words that are broken where the terminal ends."""
    reasons = health["reasons"]
    if not reasons:
        return []
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(no_wrap=True, style="bold yellow")
    table.add_column(overflow="fold", ratio=1)
    for one in reasons[:most]:
        table.add_row(span(one["since_seconds"]), one["code"], Text(one["message"]))  # Text: brackets in it are no markup
    more = len(reasons) - most
    return [table, Text(f"… and {more} more: tiercache stats", style="dim")] if more > 0 else [table]


def _workers(lanes: list[Found]) -> Table:
    table = plain_table("threads for", "alive", "of", "busy", "queued", "longest call", "died")
    for lane in lanes:
        longest = lane["longest_seconds"]
        table.add_row(
            lane["lane"],
            str(lane["alive"]),
            str(lane["threads"]),
            str(lane["busy"]),
            str(lane["queued"]),
            "·" if longest is None else f"{longest:.1f} s",
            str(lane["deaths"]),
        )
    return table


def _disk(disk: Found) -> Text:
    return Text(
        f"SSD: files of {format_size(disk['data_bytes'] + disk['metadata_bytes'])}, {format_size(disk['free_bytes'])} of "
        f"{format_size(disk['size_bytes'])} free, {disk['age_seconds']:.0f} s ago"
    )


def _stack(stack: Found) -> list[RenderableType]:
    size = stack["block_bytes"]
    title = Text(f"Blocks of {stack['block_size']} tokens, {format_size(size)}", style="bold")
    table = plain_table("tier", "blocks", "of", "full", "KV", "quarantined", "asked for", "found", "rate")
    for tier in stack["tiers"]:
        used = _used(tier)
        table.add_row(
            Text(tier["tier"], style=_STYLES.get(tier["tier"], "")),
            str(used),
            str(tier["slots"]),
            share(used, tier["slots"]),
            format_size(used * size),
            str(tier["quarantined"]),
            str(tier["queries"]),
            str(tier["hits"]),
            share(tier["hits"], tier["queries"]),
        )
    found = stack["asked"] - stack["missed"]
    lines: list[RenderableType] = [
        title,
        table,
        Text(f"{many(stack['matches'], 'match').replace('matchs', 'matches')}: {found} of {stack['asked']} blocks found"),
        Text(
            f"{many(stack['blocks'], 'block')} held, {many(stack['leases'], 'lease')}, "
            f"{many(stack['reservations'], 'reservation')}, {many(stack['in_flight'], 'transfer')} under way"
        ),
    ]
    if stack["moved"]:
        moved = plain_table("moved", "reason", "blocks", left=["reason"])
        for one in stack["moved"]:
            moved.add_row(_way(one["from"], one["to"]), one["reason"], str(one["blocks"]))
        lines += ["", moved]
    if stack["failures"]:
        lines.append(Text("failed: " + ", ".join(f"{name} {count}" for name, count in stack["failures"].items()), style="red"))
    return lines


def _used(tier: Found) -> int:
    return int(tier["slots"] - tier["free"] - tier["quarantined"])


def _way(source: str | None, target: str | None) -> Text:
    way = Text()
    way.append(source or "new", style=_STYLES.get(source or "", "dim"))
    way.append(" → ")
    way.append(target or "gone", style=_STYLES.get(target or "", "dim"))
    return way


def _sessions(sessions: list[Found]) -> Group:
    table = plain_table("session", "pid", "leases", "reservations")
    for one in sessions[:_MOST_SESSIONS]:
        table.add_row(str(one["session"]), str(one["pid"]), str(one["leases"]), str(one["reservations"]))
    more = len(sessions) - _MOST_SESSIONS
    return Group(table, Text(f"… and {more} more", style="dim")) if more > 0 else Group(table)


# --- the tree -------------------------------------------------------------------------------------------------------------


def tree_view(trees: list[Found], names: Mapping[str, Found], width: int) -> Group:
    """Return the trees, each under the name of its namespace, in lines of at most `width` characters."""
    if not trees:
        return Group(Text("No model has opened a namespace yet."))
    parts: list[RenderableType] = []
    for one in trees:
        known = names.get(one["namespace"], {})
        who = (known.get("namespace") or {}).get("model") or "unknown model"
        title = Text(who, style="bold", no_wrap=True, overflow="ellipsis")
        title.append(f"  {one['namespace'][:12]}  {many(known.get('blocks', 0), 'block')}", style="dim not bold")
        parts += [title, *(_tree_line(line, width) for line in one["tree"].splitlines()), ""]
    parts.append(Text("[tier] is the fastest that holds the blocks, (+…) has copies of them.", style="dim"))
    return Group(*parts)


def _tree_line(line: str, width: int) -> Text:
    """Colour a line's tier; of one that is too deep for the terminal only the end of its rails is shown."""
    rails = _RAILS.match(line)
    depth = rails.end() if rails else 0
    said = line[depth:]
    if len(line) > width and depth > 8:
        kept = max(6, width - len(said) - 6)
        line = f"… {depth // 3:<4}"[:6] + line[depth - kept : depth] + said
    text = Text(line, no_wrap=True, overflow="ellipsis")
    tag = _TAG.search(line)
    if tag is not None:
        text.stylize("dim", 0, tag.start())
        text.stylize(_STYLES.get(tag[1], "red"), tag.start(), tag.end())
    return text


# --- what is to go -------------------------------------------------------------------------------------------------------


def clear_view(extents: list[Found]) -> RenderableType:
    """Return what would be removed, a line a namespace; of a tenant only that there is one."""
    if not extents:
        return Text("Nothing is held there.")
    table = plain_table("namespace", "blocks", "tokens", "model", "adapter", "tenant", left=["model", "adapter", "tenant"])
    for one in extents:
        tenant = "unknown" if one["salted"] is None else "salted" if one["salted"] else "none"
        names = (_printable(one["model"] or "unknown model"), _printable(one["adapter"] or "none"))
        table.add_row(one["digest"][:12], str(one["blocks"]), str(one["tokens"]), *names, tenant)
    return table


def _printable(name: str) -> Text:
    return Text("".join(sign if sign.isprintable() else "·" for sign in name), no_wrap=True, overflow="ellipsis")


# --- the live view --------------------------------------------------------------------------------------------------------


def top_view(found: Found, before: Found | None, socket: str) -> Group:
    """Return one frame: what there is, and rates since `before`, or since the daemon's beginning without one."""
    before = before if before is not None and before["boot"] == found["boot"] else None
    seconds = max(found["seconds"] - (before["seconds"] if before else 0.0), 1e-9)
    requests = sum(found["counts"]["requests"].values()) - (sum(before["counts"]["requests"].values()) if before else 0)
    head = _head(found)
    head.append(f", {requests / seconds:.1f} requests/s")
    parts: list[RenderableType] = [head, Text(socket, style="dim", no_wrap=True, overflow="ellipsis")]
    parts += _reasons(found["health"], most=_MOST_REASONS)
    old = {stack["block_bytes"]: stack for stack in before["stacks"]} if before else {}
    for stack in found["stacks"]:
        parts += ["", *_top_stack(stack, old.get(stack["block_bytes"]), seconds)]
    if not found["stacks"]:
        parts += ["", Text("No model has opened a namespace yet.")]
    if found["sessions"]:
        parts += ["", _sessions(found["sessions"])]
    since = "the last frame" if before else "the daemon began"
    parts += ["", Text(f"rates since {since}", style="dim")]
    return Group(*parts)


def _top_stack(stack: Found, before: Found | None, seconds: float) -> list[RenderableType]:
    table = plain_table("tier", "", "blocks", "of", "KV", "hit rate", "found/s", left=[""])
    old = {tier["tier"]: tier for tier in before["tiers"]} if before else {}
    for tier in stack["tiers"]:
        used, was = _used(tier), old.get(tier["tier"], {"queries": 0, "hits": 0})
        hits = tier["hits"] - was["hits"]
        table.add_row(
            Text(tier["tier"], style=_STYLES.get(tier["tier"], "")),
            _bar(used, tier["slots"], _STYLES.get(tier["tier"], "")),
            str(used),
            str(tier["slots"]),
            format_size(used * stack["block_bytes"]),
            share(hits, tier["queries"] - was["queries"]),
            f"{hits / seconds:.1f}",
        )
    copied = {(one["from"], one["to"]): one["blocks"] for one in before["copied"]} if before else {}
    moves = Text("moves/s  ")
    for one in stack["copied"]:
        rate = (one["blocks"] - copied.get((one["from"], one["to"]), 0)) / seconds
        moves.append_text(_way(one["from"], one["to"])).append(f" {rate:.1f}   ")
    if not stack["copied"]:
        moves.append("none yet", style="dim")
    title = f"Blocks of {stack['block_size']} tokens, {format_size(stack['block_bytes'])}"
    return [Text(title, style="bold"), table, moves]


def _bar(part: int, whole: int, style: str, width: int = 20) -> Text:
    full = round(width * part / whole) if whole else 0
    if part and not full:
        full = 1
    bar = Text("█" * full, style=style)
    bar.append("░" * (width - full), style="dim")
    return bar


# --- answers of a model ---------------------------------------------------------------------------------------------------


def found_line(hit: Mapping[Tier, int], computed: int, seconds: float) -> Text:
    """Return where a prompt's KV was found, in tokens, and how long the first new token took."""
    line = Text("prefix: ", style="dim")
    for tier in TIERS:
        tokens = hit.get(tier, 0)
        line.append(f"{tier} {tokens}", style=f"not dim {COLOURS[tier]}" if tokens else "")
        line.append(", ")
    line.append(f"computed {computed}; first token after {seconds:.2f} s")
    return line
