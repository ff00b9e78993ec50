"""Checks that the files in deploy/ agree with one another.

Each linter reads one file. Only a check of several files finds a port that was
changed in one of them, or a mounted file that no other file creates.

    deploy_agrees.py ROOT SECRETS

ROOT is the top of the tree, SECRETS a folder that deploy/make-secrets filled.
Prints a line for each finding and exits 1 if there is any.
"""

import json
import pathlib
import re
import sys
import tomllib
from urllib.parse import urlsplit

import yaml

SECRETS_DIR = "./secrets/"


def main(root: pathlib.Path, secrets: pathlib.Path) -> list[str]:
    deploy = root / "deploy"
    containerfile = (deploy / "Containerfile").read_text()
    compose = yaml.safe_load((deploy / "compose.yaml").read_text())
    collector = yaml.safe_load((deploy / "otel-collector.yaml").read_text())
    prometheus = yaml.safe_load((deploy / "prometheus" / "prometheus.yaml").read_text())
    observability = env_file(deploy / "observability.env")
    unit = (deploy / "systemd" / "wakeful.service").read_text()
    unit_env = env_file(deploy / "systemd" / "wakeful.env.example", commented=True)
    workspace = tomllib.loads((root / "Cargo.toml").read_text())["workspace"]
    version = workspace["package"]["version"]
    services = compose["services"]

    findings = []

    def expect(holds: bool, finding: str) -> None:
        if not holds:
            findings.append(finding)

    # Files.
    for name, service in services.items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                expect((deploy / source).is_file(), f"compose: {name} mounts {source}, which is not there")
                expect(mount.endswith(":ro"), f"compose: {name} may write to {source}")
            else:
                expect(source in compose["volumes"], f"compose: {name} mounts the unknown volume {source}")
        if "build" in service:
            context = deploy / service["build"]["context"]
            expect((context / service["build"]["dockerfile"]).is_file(), f"compose: {name} builds from a missing file")
    for name, secret in compose["secrets"].items():
        path = secret["file"]
        expect(
            path.startswith(SECRETS_DIR) and (secrets / path.removeprefix(SECRETS_DIR)).is_file(),
            f"make-secrets does not make the secret {name}, {path}",
        )
        expect(
            any(name in service.get("secrets", []) for service in services.values()),
            f"compose: no service uses the secret {name}",
        )

    # cargo refuses a workspace with a member missing, whatever it is asked to build.
    context = (root / ".dockerignore").read_text().splitlines()
    for member in workspace["members"]:
        expect(f"!{member.split('/')[0]}" in context, f".dockerignore: keeps the workspace member {member} out of the image build")
    # Files from elsewhere that the program carries, such as the example of its configuration.
    for source in sorted(path for member in workspace["members"] for path in (root / member / "src").rglob("*.rs")):
        for name in re.findall(r'include_(?:str|bytes)!\("([^"]+)"\)', source.read_text()):
            carried = (source.parent / name).resolve().relative_to(root.resolve())
            let_in = any(f"!{part}" in context for part in [carried, *carried.parents])
            expect(let_in, f".dockerignore: keeps {carried}, which {source.relative_to(root)} includes, out of the image build")

    # The example of the unit's environment says what a process does without it.
    example = (root / "wakeful.example.toml").read_text()
    settings = tomllib.loads(example)
    for name, value in unit_env.items():
        if name.startswith("WAKEFUL_") and "__" in name:
            section, key = name.removeprefix("WAKEFUL_").lower().split("__")
            default = settings.get(section, {}).get(key)
            is_off = default is None and f'# {key} = "{value}"' in example
            agrees = is_off or str(default) == value
            expect(agrees, f"wakeful.env.example: {name} is {value}, wakeful.example.toml has {default}")
    # What reads the log's settings.
    telemetry = (root / "worker" / "engine" / "src" / "telemetry" / "mod.rs").read_text()
    expect(f'"{unit_env["WAKEFUL_LOG"]}"' in telemetry, "wakeful.env.example: WAKEFUL_LOG is not the default")
    for name in unit_env:
        known = name.startswith("OTEL_") or "__" in name or f'"{name}"' in telemetry
        expect(known, f"wakeful.env.example: the program does not read {name}")

    # The API puts up to four bundles of the largest size into /tmp.
    def holds_imports(what: str, size: str, limit_mb: int) -> None:
        number, unit = re.fullmatch(r"(\d+)(\w+)", size).groups()
        size_mb = int(number) * {"m": 1, "Mi": 1, "Gi": 1024}[unit]
        expect(size_mb > 4 * limit_mb, f"{what}: /tmp has {size}, and imports may take 4 x {limit_mb} MB of it")

    api = services["api"]
    tmpfs = next(mount for mount in api["tmpfs"] if mount.startswith("/tmp:"))
    default_mb = settings["server"]["import_limit_mb"]
    limit_mb = int(api["environment"].get("WAKEFUL_SERVER__IMPORT_LIMIT_MB", default_mb))
    holds_imports("compose", re.search(r"size=(\w+)", tmpfs).group(1), limit_mb)
    pod = next(
        one["spec"]["template"]["spec"]
        for one in yaml.safe_load_all((deploy / "kubernetes" / "api.yaml").read_text())
        if one["kind"] == "Deployment"
    )
    volume = next(one for one in pod["volumes"] if one["name"] == "tmp")
    holds_imports("kubernetes", volume["emptyDir"]["sizeLimit"], default_mb)

    # Secrets: each *_FILE points at one that this service was given.
    for name, service in services.items():
        for key, value in service.get("environment", {}).items():
            if key.endswith("_FILE"):
                secret = str(value).removeprefix("/run/secrets/")
                expect(secret in service.get("secrets", []), f"compose: {name}'s {key} names {value}, which it does not mount")
            else:
                expect(
                    not re.search(r"PASSWORD|TOKEN|API_KEY|DATABASE_URL", key),
                    f"compose: {name} has {key} in its environment instead of in a file",
                )
    loaded = set(re.findall(r"^LoadCredential=(\w+):", unit, re.M))
    named = set(re.findall(r"^Environment=\w+_FILE=%d/(\w+)$", unit, re.M))
    expect(loaded == named, f"wakeful.service: credentials loaded and named differ: {sorted(loaded ^ named)}")

    # Ports and hosts.
    exposed = re.findall(r"^EXPOSE (\d+)$", containerfile, re.M)
    expect(len(exposed) == 1, f"Containerfile: one exposed port is expected, not {exposed}")
    listen = services["api"]["environment"]["WAKEFUL_SERVER__LISTEN"].rsplit(":", 1)[1]
    expect([listen] == exposed, f"compose: the api listens on {listen}, the Containerfile exposes {exposed}")
    for name, service in services.items():
        for port in service.get("ports", []):
            address, _, target = str(port).rpartition(":")
            expect(address.startswith("127.0.0.1:"), f"compose: {name} publishes {port} beyond loopback")
            listens = {"api": listen, "grafana": "3000", "prometheus": "9090"}
            expect(listens.get(name) == target, f"compose: {name} publishes {port}, and nothing listens there")
    expect(
        unit_env["WAKEFUL_SERVER__LISTEN"] == f"127.0.0.1:{listen}",
        "wakeful.env.example: its listen address is not the Containerfile's port",
    )
    for scrape in prometheus["scrape_configs"]:
        for asked in scrape["dns_sd_configs"]:
            for name in asked["names"]:
                environment = services.get(name, {}).get("environment", {})
                expect(
                    environment.get("WAKEFUL_MONITORING__LISTEN") == f"0.0.0.0:{asked['port']}",
                    f"prometheus.yaml: the service {name} has no metrics at port {asked['port']}",
                )
    for rules in prometheus["rule_files"]:
        mounted = any(rules in mount for mount in services["prometheus"]["volumes"])
        expect(mounted, f"compose: prometheus does not mount {rules}")
    source = yaml.safe_load((deploy / "grafana" / "datasource.yaml").read_text())["datasources"][0]
    asked = urlsplit(source["url"])
    expect(asked.hostname in services and asked.port == 9090, f"grafana: the source {source['url']} is no service")
    dashboard = json.loads((deploy / "grafana" / "wakeful.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            uid = target["datasource"]["uid"]
            expect(uid == source["uid"], f"grafana: the panel {panel['title']} asks {uid}, and the source is {source['uid']}")
    otlp = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rsplit(":", 1)[1]
    endpoint = urlsplit(observability["OTEL_EXPORTER_OTLP_ENDPOINT"])
    expect(endpoint.hostname in services, f"observability.env: no service {endpoint.hostname}")
    expect(str(endpoint.port) == otlp, f"observability.env: port {endpoint.port}, but the collector takes OTLP on {otlp}")
    unit_endpoint = urlsplit(unit_env["OTEL_EXPORTER_OTLP_ENDPOINT"])
    expect(str(unit_endpoint.port) == otlp, f"wakeful.env.example: OTLP on {unit_endpoint.port}, not on {otlp}")
    profiles = services[endpoint.hostname]["profiles"] if endpoint.hostname in services else []
    expect(observability["COMPOSE_PROFILES"] in profiles, "observability.env: its profile does not start the collector")
    for name, pipeline in collector["service"]["pipelines"].items():
        for kind in ("receivers", "processors", "exporters"):
            missing = set(pipeline[kind]) - set(collector[kind])
            expect(not missing, f"otel-collector: pipeline {name} uses undefined {kind} {sorted(missing)}")
    env = services["postgres"]["environment"]
    for name, user in (("database_url", env["POSTGRES_USER"]), ("runtime_url", "wakeful_runtime")):
        made = secrets / name
        if made.is_file():
            url = urlsplit(made.read_text())
            expect(
                (url.hostname, url.port, url.username, url.path) == ("postgres", 5432, user, f"/{env['POSTGRES_DB']}"),
                f"make-secrets: {name} does not lead to the postgres service as {user}",
            )
    for name in ("api", "worker"):
        expect("database_url" not in services[name].get("secrets", []), f"compose: {name} may log in as the owner")

    # A client of Postgres or of the collector must share a network with it.
    for name, service in services.items():
        if "DATABASE_URL_FILE" in service.get("environment", {}):
            shared = set(service["networks"]) & set(services["postgres"]["networks"])
            expect(bool(shared), f"compose: {name} shares no network with postgres")

    # Hardening, an exact image each, and time to drain.
    for name, service in services.items():
        expect(service.get("read_only") is True, f"compose: {name} is not read_only")
        expect(service.get("cap_drop") == ["ALL"], f"compose: {name} keeps capabilities")
        expect("no-new-privileges:true" in service.get("security_opt", []), f"compose: {name} may gain privileges")
        image = service["image"].rsplit("/", 1)[-1]
        expect(bool(re.fullmatch(r"[\w.-]+:v?\d[\w.-]*\.\d[\w.-]*(@sha256:[0-9a-f]{64})?", image)), f"compose: {image} is not pinned")
        if "build" in service:
            expect(image == f"wakeful:{version}", f"compose: {name} runs {image}, Cargo.toml says {version}")
    expect(f"ARG VERSION={version}\n" in containerfile, f"Containerfile: VERSION is not {version}")
    for image in re.findall(r"^FROM (\S+)", containerfile, re.M):
        pinned = image == "scratch" or re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", image)
        expect(bool(pinned), f"Containerfile: {image} is not pinned")
    rust = workspace["package"]["rust-version"]
    expect(f"FROM rust:{rust}." in containerfile, f"Containerfile: its Rust is not Cargo.toml's {rust}")
    drain = re.search(r"^TimeoutStopSec=(\S+)$", unit, re.M)
    expect(
        drain is not None and drain[1] == services["worker"]["stop_grace_period"],
        "wakeful.service and compose give a worker different times to drain",
    )

    # Kubernetes.
    folder = deploy / "kubernetes"
    made = set()
    for kustomization in [folder / "kustomization.yaml", folder / "migrate" / "kustomization.yaml"]:
        said = yaml.safe_load(kustomization.read_text())
        present = {path.name for path in kustomization.parent.glob("*.yaml")} - {"kustomization.yaml"}
        expect(set(said["resources"]) == present, f"{kustomization} does not list {sorted(present)}")
        made |= {generated["name"] for generated in said.get("configMapGenerator", [])}
        tags = [image["newTag"] for image in said["images"]]
        expect(tags == [version], f"{kustomization}: the image is not Cargo.toml's version")
    for path in ["migrate/job.yaml", "api.yaml", "worker.yaml", "cleaning.yaml"]:
        for thing in yaml.safe_load_all((folder / path).read_text()):
            if thing["kind"] not in ("Deployment", "Job", "CronJob"):
                continue
            of_pods = thing["spec"]["jobTemplate"]["spec"] if thing["kind"] == "CronJob" else thing["spec"]
            pod = of_pods["template"]["spec"]
            (container,) = pod["containers"]
            env = {one["name"]: one["value"] for one in container["env"]}
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            expect(set(mounts) == set(volumes), f"{path}: volumes and mounts differ")
            expect(pod["enableServiceLinks"] is False, f"{path}: a service's variables would be read as configuration")
            hardened = container["securityContext"]
            expect(
                pod["securityContext"]["runAsNonRoot"]
                and hardened["readOnlyRootFilesystem"]
                and not hardened["allowPrivilegeEscalation"]
                and hardened["capabilities"] == {"drop": ["ALL"]},
                f"{path}: not hardened",
            )
            for name, value in env.items():
                if name.endswith("_FILE"):
                    expect(any(value.startswith(f"{mount}/") for mount in mounts.values()), f"{path}: {name} names no mounted file")
                if name.startswith("WAKEFUL_") and "__" in name:
                    section, key = name.removeprefix("WAKEFUL_").lower().split("__")
                    said = re.search(rf"^\[{section}\]\n(?:(?!\[).*\n)*?(?:# )?{key} = ", example, re.M)
                    expect(bool(said), f"{path}: wakeful.example.toml has no {section}.{key}")
            for name, key in [("monitoring", "WAKEFUL_MONITORING__LISTEN"), ("http", "WAKEFUL_SERVER__LISTEN")]:
                if name in ports:
                    expect(env[key] == f"0.0.0.0:{ports[name]}", f"{path}: {key} is not port {ports[name]}")
            for volume in volumes.values():
                expect("configMap" not in volume or volume["configMap"]["name"] in made, f"{path}: no such config map")
            if thing["kind"] == "Deployment":
                grace = f"{pod['terminationGracePeriodSeconds']}s"
                expect(grace == services["worker"]["stop_grace_period"], f"{path}: another time to drain than compose's")
                selected = thing["spec"]["selector"]["matchLabels"].items()
                expect(selected <= thing["spec"]["template"]["metadata"]["labels"].items(), f"{path}: selects other pods")
    return findings


def env_file(path: pathlib.Path, commented: bool = False) -> dict[str, str]:
    """The assignments of an environment file. `commented` includes those in comments."""
    prefix = "#?" if commented else ""
    return dict(re.findall(rf"^{prefix}([A-Z_]+)=(.*)$", path.read_text(), re.M))


if __name__ == "__main__":
    found = main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
    print("".join(f"{line}\n" for line in found), end="")
    sys.exit(1 if found else 0)
