"""Build the site of the documentation: ``make docs``.

The script copies the pages and their linked files to build/pages, writes an API reference there, and
runs mkdocs, which writes build/site. A broken link, or a public name without an entry, ends the build with an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import dbuffer  # noqa: E402
import megatron_fsdp  # noqa: E402

PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
NOTEBOOK = "examples/quickstart.ipynb"

# Title of a page of the reference, and the names on it.
REFERENCE: Mapping[str, Mapping[str, str]] = {
    "megatron_fsdp": {
        "Shard a model": "fully_shard FSDPModule Placements MixedPrecisionPolicy DataParallelMeshDims OffloadPolicy "
        "CPUOffloadPolicy replicate fsdp_no_shard materialize register_fsdp_forward_method share_comm_ctx "
        "expert_matmul",
        "Train": "microbatch no_sync join JoinedBatches unsharded fully_shard_optimizer AdamW Muon clip_grad_norm_ "
        "check_gradients UnshardHandle GradientReductionHandle",
        "Save and load": "save_checkpoint load_checkpoint CheckpointSeries SaveHandle full_state_dict "
        "export_safetensors import_safetensors",
        "Send weights": "weight_stream WeightStream StreamReport WeightBucket BucketEntry apply_bucket local_shards "
        "LocalShard weight_version remember_weights DeltaStream DeltaBucket DeltaReport apply_delta weight_layout "
        "TransferLayout plan_transfer TransferPlan send_weights receive_weights reshard_",
        "Plan and observe": "explain Report Timeline Watch GradientScale check_gradient_scale checksum unit_checksums",
        "Megatron flags": "add_megatron_fsdp_args FsdpConfig",
        "Errors": "FsdpError AgreementError CheckpointError ConfigError DamagedCheckpointError GradientScaleError "
        "NonfiniteGradientError OwnershipError StateError TransferError DBufferError LayoutError MeshError "
        "PlacementError StorageError",
    },
    "dbuffer": {},
}

# The order of the pages; a page that is missing here is an error.
NAVIGATION: Mapping[str, Sequence[str]] = {
    "Start": ("README.md", "docs/quickstart.md", "docs/training_script.md", "docs/launch.md"),
    "Guides": (
        "docs/planning.md",
        "docs/deepspeed.md",
        "docs/checkpoints.md",
        "docs/weights_to_inference.md",
        "docs/ranks_that_differ.md",
        "docs/reliability.md",
        "docs/huggingface.md",
        "docs/megatron.md",
        "docs/low_precision.md",
        "docs/muon.md",
        "docs/timeline.md",
        "docs/gradient_scale.md",
        "docs/first_gpu_run.md",
    ),
    "Concepts": (
        "docs/how_a_step_works.md",
        "docs/architecture.md",
        "docs/padding.md",
        "docs/design/states.md",
        "docs/design/order.md",
    ),
    "Reference": (
        "docs/features.md",
        "docs/flags.md",
        "docs/compatibility.md",
        "docs/performance.md",
        "benchmarks/RESULTS.md",
    ),
    "Design": ("CONTRIBUTING.md", "CHANGELOG.md"),
}


def main() -> int:
    """Build the site; return the exit code of mkdocs, or 1 where a public name is missing."""
    stage()
    config = PAGES.with_name("mkdocs.yml")
    config.write_text(json.dumps(configuration(), indent=2), encoding="utf-8")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Material's own appeal for another tool is no warning about these pages.
    environment = {**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"}
    code = subprocess.run(command, env=environment, check=False).returncode
    missing = [] if code else names_without_anchor()
    if missing:
        print(f"public names that are not on the site: {', '.join(missing)}", file=sys.stderr)
    if not code and not missing:
        print(f"the site is {SITE.relative_to(ROOT)}/index.html")
    return code or bool(missing)


def public_names() -> dict[str, list[str]]:
    """Return the public names of each package."""
    return {
        module.__name__: [name for name in module.__all__ if not name.startswith("__")]
        for module in (megatron_fsdp, dbuffer)
    }


def reference_pages() -> dict[str, str]:
    """Return the pages of the API reference, by their paths: each public name is on one of them."""
    pages = {}
    for package, names in public_names().items():
        groups = {title: group.split() for title, group in REFERENCE[package].items()}
        grouped = {name for group in groups.values() for name in group}
        if rest := [name for name in names if name not in grouped]:
            groups[package if not groups else f"More of {package}"] = rest
        for title, group in groups.items():
            path = f"reference/{re.sub(r'[^a-z]+', '_', title.lower())}.md"
            entries = "\n\n".join(_entry(package, name) for name in group)
            pages[path] = f"# {title}\n\nImport these names from `{package}`.\n\n{entries}\n"
    return pages


def _entry(package: str, name: str) -> str:
    """Return what mkdocstrings turns into the entry of a name; of PyTorch's own classes, a sentence."""
    home = getattr(getattr(sys.modules[package], name), "__module__", package)
    if home.startswith("torch."):
        public = home.removesuffix(".placement_types")
        return f"## {name} {{ #{package}.{name} }}\n\nPyTorch's own class, `{public}.{name}`."
    return f"::: {package}.{name}"


def navigation(pages: Iterable[str]) -> list[dict[str, list[str]]]:
    """Return the order of all pages; design notes that are no concept come last."""
    sections = {title: list(paths) for title, paths in NAVIGATION.items()}
    placed = {path for paths in sections.values() for path in paths}
    rest = sorted(set(pages) - placed)
    sections["Reference"][:0] = [path for path in reference_pages() if path in rest]
    sections["Design"][:0] = [path for path in rest if path.startswith("docs/design/")]
    lost = [path for path in rest if not path.startswith(("docs/design/", "reference/"))]
    if lost:
        raise LookupError(
            f"pages without a place. fix: add them to NAVIGATION in docs/build_site.py: {', '.join(lost)}"
        )
    return [{title: paths} for title, paths in sections.items()]


# ---------------------------------------------------------------------- staging


def stage() -> None:
    """Copy the pages and their linked files to build/pages, and write the reference there."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for path in source_pages():
        _write(str(path.relative_to(ROOT)), _linked(path))
    _write("docs/quickstart.md", notebook_page(json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))))
    for name, text in reference_pages().items():
        _write(name, text)


def source_pages() -> list[Path]:
    """Return the pages of the repository."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/RESULTS.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]


def _write(name: str, text: str) -> None:
    target = PAGES / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def _linked(page: Path) -> str:
    """Return the text of a page; copy the files that it links to, and leave out links to folders."""

    def put(found: re.Match[str]) -> str:
        words, link, anchor = found.groups()
        target = (page.parent / link).resolve()
        if target == ROOT / NOTEBOOK:
            # The site shows the notebook as a page.
            return f"[{words}]({os.path.relpath(ROOT / 'docs/quickstart.md', page.parent)})"
        if target.is_dir():
            return words
        if target.is_file() and target.suffix != ".md":
            copy = PAGES / target.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(target, copy)
        return f"[{words}]({link}{anchor or ''})"

    text = page.read_text(encoding="utf-8")
    # Code keeps its brackets.
    parts = re.split(r"(^```.*?^```)", text, flags=re.MULTILINE | re.DOTALL)
    pattern = r"\[([^\]]*)\]\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)"
    return "".join(part if part.startswith("```") else re.sub(pattern, put, part) for part in parts)


def notebook_page(notebook: Mapping[str, list[dict[str, object]]]) -> str:
    """Return a notebook as Markdown: its text, code, printed output and pictures."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])  # type: ignore[arg-type]
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:  # type: ignore[attr-defined]
            data = output.get("data", {})
            printed = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                parts.append(
                    f"![What the code above draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
                )
            elif printed.strip():
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------- mkdocs


def configuration() -> dict[str, object]:
    """Return the configuration of mkdocs."""
    pages = [str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")]
    options = {
        "heading_level": 2,
        "show_root_heading": True,
        "show_root_full_path": False,
        "show_source": False,
        "members_order": "source",
        "docstring_section_style": "list",
        "show_signature_annotations": True,
        "separate_signature": True,
        "inherited_members": False,
        "filters": ["!^_"],
        "docstring_options": {"warnings": False},
        "extensions": [str(ROOT / "docs" / "docstring_examples.py")],
    }
    handler = {"python": {"paths": [str(ROOT), str(ROOT / "kernels")], "options": options}}
    return {
        "site_name": "Megatron-FSDP on DBuffer",
        "docs_dir": str(PAGES),
        "site_dir": str(SITE),
        # The site opens from a folder, without a server.
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,
            "features": ["navigation.tabs", "navigation.top", "content.code.copy", "toc.follow"],
        },
        "plugins": ["search", {"mkdocstrings": {"handlers": handler}}],
        "markdown_extensions": ["admonition", "attr_list", "tables", "pymdownx.highlight", "pymdownx.superfences"],
        "validation": {
            "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "warn"},
            "nav": {"omitted_files": "warn", "not_found": "warn"},
        },
        "nav": navigation(pages),
    }


def names_without_anchor() -> list[str]:
    """Return the public names that no page of the built reference has an entry for."""
    text = "".join(path.read_text(encoding="utf-8") for path in (SITE / "reference").rglob("*.html"))
    names = [f"{package}.{name}" for package, each in public_names().items() for name in each]
    return [name for name in names if f'id="{name}"' not in text]


if __name__ == "__main__":
    sys.exit(main())
