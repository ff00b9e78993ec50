"""Prints the bill of materials of the binary `wakeful`: CycloneDX 1.5, as JSON.

    sbom.py [CARGO]

Reads `cargo metadata` and Cargo.lock only, so the same sources give the same bytes. It lists what the default features of
the package bring in on the targets that we build for, without what only tests and builds need.
"""

import json
import pathlib
import subprocess
import sys
import tomllib

TARGETS = ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin"]
PACKAGE = "wakeful"


def main(cargo: str) -> None:
    root = pathlib.Path(__file__).resolve().parent.parent
    command = [cargo, "metadata", "--locked", "--format-version=1", "--manifest-path", str(root / "Cargo.toml")]
    for target in TARGETS:
        command += ["--filter-platform", target]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    lock = tomllib.loads((root / "Cargo.lock").read_text())
    checksums = {(one["name"], one["version"]): one.get("checksum") for one in lock["package"]}
    packages = {one["id"]: one for one in metadata["packages"]}
    nodes = {one["id"]: one for one in metadata["resolve"]["nodes"]}
    top = next(one["id"] for one in metadata["packages"] if one["name"] == PACKAGE and one["source"] is None)

    reached, waiting = set(), [top]
    while waiting:
        one = waiting.pop()
        if one in reached:
            continue
        reached.add(one)
        waiting += needed(nodes[one])

    def reference(one: str) -> str:
        package = packages[one]
        return f"pkg:cargo/{package['name']}@{package['version']}"

    def component(one: str) -> dict:
        package = packages[one]
        shown = {
            "type": "application" if one == top else "library",
            "bom-ref": reference(one),
            "name": package["name"],
            "version": package["version"],
            "purl": reference(one),
        }
        if package["license"]:
            shown["licenses"] = [{"expression": package["license"].replace("/", " OR ")}]
        if checksum := checksums.get((package["name"], package["version"])):
            shown["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        return shown

    others = sorted(reached - {top}, key=reference)
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component(top)},
        "components": [component(one) for one in others],
        "dependencies": [
            {"ref": reference(one), "dependsOn": sorted({reference(other) for other in needed(nodes[one])})}
            for one in [top, *others]
        ],
    }
    json.dump(bill, sys.stdout, indent=1)
    print()


def needed(node: dict) -> list[str]:
    """The packages that end up in the binary: neither those of tests nor those of build scripts."""
    return [one["pkg"] for one in node["deps"] if any(kind["kind"] is None for kind in one["dep_kinds"])]


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cargo"])
