"""The guard over every causal model of transformers: which cuts compute what one process computes.

    python benchmarks/certificates.py --degrees tp=2            # results into benchmarks/results/certificates.json and .md
    python benchmarks/certificates.py --degrees cp=2,sharding=ddp
    python benchmarks/certificates.py --degrees tp=2,sharding=fsdp --families llama,qwen3,mixtral   # four ranks
    python benchmarks/certificates.py --smoke                   # one model

Each family's default config, made small, takes two steps in one process and over ranks. A family that is refused before ranks
start is counted with its reason. The results are written after each family; a second call goes on where the first stopped.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from machine import about, parse, parser, write_results

import toolkit as tk
from toolkit.core.display import Table
from toolkit.core.errors import ToolkitError


def families() -> list[str]:
    """Return the model types of transformers' causal classes."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def certificate(family: str, degrees: dict[str, Any]) -> dict[str, Any]:
    """Return a family's certificate, or why there is none."""
    from transformers import AutoConfig

    try:
        spec = tk.describe(AutoConfig.for_model(family))
        return {"family": family, **tk.guard(spec, tk.Strategy(precision="fp32", **degrees)).to_dict()}
    except ToolkitError as error:
        return {"family": family, "refused": str(error)}
    except Exception as error:  # a config that transformers cannot build without values
        return {"family": family, "refused": f"no default config: {type(error).__name__}"}


def tables(rows: list[dict[str, Any]]) -> list[Table]:
    """Return the certificates, and the reasons of the others with their numbers."""
    done = [row for row in rows if "agrees" in row]
    reasons: Counter[str] = Counter()
    for row in rows:
        if "refused" in row:
            reasons[row["refused"].split(": ", 1)[-1].split(". ")[0][:90]] += 1
    figures = [
        (
            row["family"],
            "yes" if row["agrees"] else "NO",
            f"{row['loss_difference']:.0e}",
            f"{row['norm_difference']:.0e}",
            row["gradient"] or "",
            f"{row['seconds']:.0f}",
        )
        for row in sorted(done, key=lambda row: (row["agrees"], row["family"]))
    ]
    return [
        Table(
            title=f"{sum(row['agrees'] for row in done)} of {len(done)} cuts compute what one process computes",
            columns=("family", "the same", "loss", "norm", "first other gradient", "seconds"),
            rows=figures,
        ),
        Table(
            title=f"Without a certificate: {len(rows) - len(done)}. Tried: {len(rows)} of {len(families())} families",
            columns=("families", "why"),
            rows=[(n, why) for why, n in reasons.most_common()],
        ),
    ]


def main() -> None:
    """Certify all families, and write after each."""
    flags = parser(__doc__)
    flags.add_argument("--degrees", default="tp=2", help="fields of the strategy, with commas (default: %(default)s)")
    flags.add_argument("--families", help="model types, with commas (default: all)")
    given = parse(flags, families="llama,gpt2")
    degrees = {
        name: int(value) if value.isdigit() else value
        for name, value in (word.split("=") for word in given.degrees.split(","))
    }
    words = [f"{key}{value}" if isinstance(value, int) else value for key, value in degrees.items()]
    name = "_".join(["certificates", *words]) if given.degrees != flags.get_default("degrees") else "certificates"
    path: Path = given.results / f"{name}.json"
    before: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    rows = before.get("rows", []) if before.get("commit") == about()["commit"] else []
    known = {row["family"] for row in rows}
    for family in given.families.split(",") if given.families else families():
        if family not in known:
            rows.append(certificate(family, degrees))
            shown = "\n\n".join(table.text() for table in tables(rows))
            write_results(given.results, name, f"Certificates of {given.degrees}", {**about(), "rows": rows}, shown)
    print("\n\n".join(table.text() for table in tables(rows)))


if __name__ == "__main__":
    main()
