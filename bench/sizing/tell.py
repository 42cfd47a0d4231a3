"""A plan for people: a table, a verdict in words, a plot, and the fragment of Helm values that follows from it."""

from collections.abc import Sequence

from bench.client.svg import Series, plot
from bench.sizing.model import Stage
from bench.sizing.plan import Plan, Row
from bench.sizing.profile import Profile

_ADVICE = {
    Stage.PREFILL: "prefill-bound: adding decode workers does nothing",
    Stage.DECODE: "decode-bound: adding prefill workers does nothing",
    Stage.KV: "bound by the KV memory of decode workers: adding prefill workers does nothing",
    Stage.TRANSFER: "bound by the transfers to decode workers: a faster link or more decode workers help",
    Stage.UNIFIED: "prompts and answers are in each other's way on the same workers",
    Stage.NONE: "",
}


def markdown(plan: Plan, profile: Profile) -> str:
    lines = [
        f"Objectives: {plan.objective}, for {plan.share:.0%} of all requests. {plan.num_workers} workers"
        + (f" ({profile.hardware})." if profile.hardware else "."),
        "",
        "| split | requests/s | simulated | limited by | prefill busy | decode full |",
        "| --- | ---: | ---: | --- | ---: | ---: |",
    ]
    lines += [_line(row, plan) for row in (*plan.rows, plan.unified)]
    lines += ["", verdict(plan), ""]
    lines += ["| if | best | requests/s | this choice |", "| --- | --- | ---: | ---: |"]
    lines += [f"| {each.what} | {each.best} | {each.rate:.3g} | {each.kept:.3g} |" for each in plan.sensitivity]
    lines += [
        "",
        "- requests/s: the highest rate at which so many requests meet all objectives; by formulas (queues of prompts, "
        "batches of answers), and by simulation where that was asked for.",
        "- prefill busy, decode full: at that rate; batch of answers over the largest that meets TPOT or fits.",
        "- naive: by the ratio of mean busy times, with batches of 64 answers.",
    ]
    return "\n".join(lines) + "\n"


def _line(row: Row, plan: Plan) -> str:
    marks = [
        *(["**best**"] if row.split == plan.best.split else []),
        *(["naive"] if row.split == plan.naive.split else []),
    ]
    simulated = "" if row.simulated is None else f"{row.simulated:.3g}"
    name = f"{row.split} {' '.join(marks)}".strip()
    full = f"{row.decode_load:.0%}" if row.decode_load < 100 else "-"
    return f"| {name} | {row.rate:.3g} | {simulated} | {row.limit} | {row.prefill_load:.0%} | {full} |"


def verdict(plan: Plan) -> str:
    split, unified, naive = plan.best_split, plan.unified, plan.naive
    source = "simulated" if unified.simulated is not None else "by formulas"
    if not plan.is_split:
        text = (
            f"**Do not split.** {unified.split} serve {unified.known_rate:.3g} requests/s, the best split "
            f"({split.split}) {split.known_rate:.3g} ({source})."
        )
    else:
        gain = split.known_rate / unified.known_rate - 1 if unified.known_rate else float("inf")
        than = f"{gain:+.0%} against {unified.split}" if gain < 100 else f"{unified.split} serve none"
        text = f"**{split.split}** serves {split.known_rate:.3g} requests/s ({source}), {than}."
        text += f" It is {_ADVICE[split.limit]}."
    if naive.split != split.split:
        lost = 1 - naive.known_rate / split.known_rate if split.known_rate else 0.0
        text += f" The ratio of mean rates says {naive.split}: {lost:.0%} less than {split.split}."
    return text


def picture(plan: Plan) -> str:
    """Rates over the number of prefill workers."""
    rows = plan.rows
    ends = [float(rows[0].split.prefill), float(rows[-1].split.prefill)]
    series = [
        Series(name="split, formulas", points=[(row.split.prefill, row.rate) for row in rows]),
        Series(name="unsplit, formulas", points=[(x, plan.unified.rate) for x in ends]),
    ]
    simulated = [(float(row.split.prefill), row.simulated) for row in rows if row.simulated is not None]
    if simulated:
        series.append(Series(name="split, simulated", points=simulated, is_dots=len(simulated) < 2))
    if plan.unified.simulated is not None:
        series.append(Series(name="unsplit, simulated", points=[(x, plan.unified.simulated) for x in ends]))
    title = f"Requests a second within the objectives, {plan.num_workers} workers"
    return plot(title, series, x_label="prefill workers", y_label="requests/s")


def values(plan: Plan, model: str) -> str:
    """The part of the chart's values (and of the configuration) that says how many workers there are."""
    split = plan.best.split
    pools = {"prefill": split.prefill, "decode": split.decode, "unified": split.unified}
    lines = [f"# baton plan: {verdict(plan).replace('**', '')}", "config:", "  models:", f"    - name: {model}"]
    lines += ["      pools:"]
    lines += [f"        {role}: {{replicas: {number}}}" for role, number in pools.items() if number]
    return "\n".join(lines) + "\n"


def as_json(plan: Plan) -> dict[str, object]:
    def row(each: Row) -> dict[str, object]:
        return {
            "split": str(each.split),
            "prefill": each.split.prefill,
            "decode": each.split.decode,
            "unified": each.split.unified,
            "rate": each.rate,
            "simulated": each.simulated,
            "limit": str(each.limit),
        }

    rows: Sequence[Row] = (*plan.rows, plan.unified)
    return {
        "objective": str(plan.objective),
        "share": plan.share,
        "workers": plan.num_workers,
        "best": str(plan.best.split),
        "is_split": plan.is_split,
        "naive": str(plan.naive.split),
        "rows": [row(each) for each in rows],
        "sensitivity": [
            {"what": each.what, "best": str(each.best), "rate": each.rate, "kept": each.kept}
            for each in plan.sensitivity
        ],
    }
