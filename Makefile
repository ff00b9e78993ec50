# `make help` lists the targets. Each installs what it misses, where it may; none needs a terminal.
.DEFAULT_GOAL := help
SHELL := /bin/sh
MAKEFLAGS += --no-print-directory

CARGO ?= cargo
# More arguments for the program or the test run: make test ARGS=ledger
ARGS ?=
# One selection for everything, so that no dependency is compiled twice. The package of the tests turns on the failpoints;
# `-p wakeful` alone never has them.
FEATURES ?=
BUILD := --workspace --locked $(FEATURES)
# A Postgres for the length of one command.
WITH_POSTGRES := $${CARGO_TARGET_DIR:-target}/debug/with_postgres

.PHONY: help
help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 23

.PHONY: dev
dev: postgres ## Run Wakeful with a Postgres of its own and samples
	@test -e target/debug/wakeful || echo "The first build takes some minutes."
	$(CARGO) run --locked -p wakeful -- dev $(ARGS)

.PHONY: demo
demo: postgres ## Kill a worker in the middle of a chat and see another go on
	$(CARGO) run --locked -p wakeful -- demo $(ARGS)

.PHONY: test
test: run-tests doc-tests ## Run all tests except the slow ones (needs Rust and Postgres only)

.PHONY: run-tests
run-tests: postgres with-postgres
	@if $(CARGO) nextest --version >/dev/null 2>&1; then \
		set -ex; \
		$(WITH_POSTGRES) $(CARGO) nextest run $(BUILD) $(ARGS); \
	else \
		set -ex; \
		$(WITH_POSTGRES) $(CARGO) test $(BUILD) --tests $(ARGS); \
	fi

.PHONY: doc-tests
doc-tests:
	$(CARGO) test --doc $(BUILD)

# Builds the tests and all programs that they run, so that the test run builds nothing.
.PHONY: with-postgres
with-postgres:
	$(CARGO) build $(BUILD) --bins --tests

# `make check` builds everything once: see scripts/check.
.PHONY: build
build:
	$(CARGO) build $(BUILD) --all-targets

# The ignored tests are the slow ones, the tests against peers, and the storm of many seeds.
SLOW_TESTS = $(CARGO) test $(BUILD) --test main -- --ignored --skip peers:: --skip compare:: --skip storm::as_many_seeds_as_one_likes $(ARGS)

.PHONY: test-slow
test-slow: postgres with-postgres ## Run the slow tests, which `make test` leaves out
	@$(SLOW_TESTS) --list 2>/dev/null | grep -q ': test$$' || { echo "There is no slow test to run" >&2; exit 1; }
	WAKEFUL_TEST_TIMEOUT_S=300 $(WITH_POSTGRES) $(SLOW_TESTS) --test-threads 3

PEER_TESTS = $(CARGO) test $(BUILD) --test main -- --ignored peers:: $(ARGS)

.PHONY: test-peers
test-peers: postgres peers with-postgres ## Run the tests against servers that others wrote
	@# A run of no tests passes, and would hide that they were renamed.
	@$(PEER_TESTS) --list 2>/dev/null | grep -q ': test$$' || { echo "There is no test of peers to run" >&2; exit 1; }
	WAKEFUL_PEERS="$$PWD/.peers" $(WITH_POSTGRES) $(PEER_TESTS)

# Three minutes: Absurd waits for two until it takes up what a killed worker had.
.PHONY: compare-crash
compare-crash: postgres with-postgres ## Kill agents that charge cards: Wakeful, Absurd, DBOS and LangGraph, which it installs
	@scripts/setup compare-peers
	WAKEFUL_PEERS="$$PWD/.peers/bench" WAKEFUL_TEST_TIMEOUT_S=300 $(WITH_POSTGRES) \
		$(CARGO) test $(BUILD) --test main -- --ignored --nocapture compare:: $(ARGS)

.PHONY: check-deploy
check-deploy: ## Lint deploy/ with the linters of others, which it installs
	scripts/check-deploy

# Features that are off by default: AWS' SDK takes minutes to compile, and few still have chats in Redis.
OPTIONAL := --workspace --locked --features wakeful-tests/ses,wakeful-tests/legacy-redis,wakeful-tests/object-stores
.PHONY: test-optional
test-optional: postgres ## Lint and test what only optional features have: Amazon SES, old chats in Redis, files in object stores
	@scripts/setup moto azurite
	@scripts/setup peers
	$(CARGO) clippy $(OPTIONAL) --all-targets -- -D warnings
	$(CARGO) build $(OPTIONAL) --bins --tests
	$(CARGO) test $(OPTIONAL) --lib -- ses:: legacy::
	$(WITH_POSTGRES) $(CARGO) test $(OPTIONAL) --test main -- legacy_chat:: blobs::
	WAKEFUL_PEERS="$$PWD/.peers" $(WITH_POSTGRES) $(CARGO) test $(OPTIONAL) --test main -- \
		--ignored peers::ses:: peers::legacy_chat:: peers::blobs::

# A session's id, or a file that `wakeful session export` made. Not from the environment: SESSION may be a desktop's.
GIVEN_SESSION = $(or $(SESSION_ID),$(if $(filter-out environment%,$(origin SESSION)),$(SESSION)))

.PHONY: replay
replay: ## Run a session again, dry: SESSION_ID=id or SESSION=file [MODEL=m] [FROM_MESSAGE=n] [ARGS=...]
	@test -n "$(GIVEN_SESSION)" || { echo "make replay SESSION_ID=sess_... (or SESSION=file): what is to be run again?" >&2; exit 2; }
	@# Without DATABASE_URL it is the database of the `make dev` that runs.
	@url=$${DATABASE_URL:-$$($(CARGO) run --quiet --locked -p wakeful -- dev url)} || exit 6; \
	DATABASE_URL="$$url" $(CARGO) run --quiet --locked -p wakeful -- replay "$(GIVEN_SESSION)" \
		$(if $(MODEL),--model "$(MODEL)") $(if $(FROM_MESSAGE),--from-message "$(FROM_MESSAGE)") $(ARGS)

.PHONY: storm
storm: postgres with-postgres ## Many seeded storms: SEEDS=n [SEED_BASE=m] [JOBS=j, default 2] [DEFAULTS=1: the default settings]
	SEEDS=$(or $(SEEDS),20) SEED_BASE=$(or $(SEED_BASE),1) JOBS=$(or $(JOBS),2) \
		$(CARGO) test $(BUILD) --test main -- --ignored --nocapture \
		--exact storm::as_many_seeds_as_one_likes$(if $(DEFAULTS),_at_the_default_settings)

# Part of `make test` too, at a fiftieth of its measure.
.PHONY: trial
trial: postgres with-postgres ## Hostile input in bulk, from seeds: requests, webhooks, connections, paths, bundles, snapshots, git, secrets, spaces
	WAKEFUL_TRIAL=whole WAKEFUL_TEST_TIMEOUT_S=300 $(WITH_POSTGRES) \
		$(CARGO) test $(BUILD) --test main -- trial:: ten_thousand_unknown_keys --nocapture --test-threads 1 $(ARGS)
	WAKEFUL_TRIAL=whole $(CARGO) test $(BUILD) --lib -- no_payload_becomes_markup leads_out

.PHONY: mutants
mutants: postgres with-postgres ## Put one defect after the other into the product: the tests must notice each
	@scripts/mutants $(ARGS)

.PHONY: check
check: ## Everything that CI runs, and how long each part took
	@BUILD_ONCE=1 scripts/check fmt-check agree build doc-tests run-tests

# Fast checks: every patch of `make mutants` still applies, and the files of deploy/ do not contradict each other.
.PHONY: agree
agree:
	scripts/mutants --check
	scripts/check-deploy --agreement

.PHONY: deny
deny: ## Check licences, sources and advisories of everything that Cargo.lock brings in
	@scripts/deny

.PHONY: sbom
sbom: ## Write the bill of materials of the binary, CycloneDX 1.5: [FILE=wakeful.cdx.json]
	@python3 scripts/sbom.py "$(CARGO)" >"$(or $(FILE),wakeful.cdx.json)"

# Runs before an issue is called resolved.
.PHONY: soak
soak: ## What takes too long for every change: storms (SEEDS=n), peers, mutants, optional features, slow tests, licences
	@scripts/check deny doc test-slow trial storm demo test-peers test-optional compare-crash check-deploy mutants

# Both commands select the same packages, so cargo compiles everything once, and without the failpoints of the tests.
BENCH = $(CARGO) build --release --locked -p wakeful-bench -p wakeful --bin wakeful && \
	$(CARGO) bench --locked -p wakeful-bench --bench figures --

.PHONY: bench
bench: postgres ## What Wakeful costs next to pgbench: ARGS="--quick --only worker --json FILE --plot FILE --tmpfs"
	$(BENCH) $(ARGS)

.PHONY: bench-compare
bench-compare: postgres ## The same steps with Absurd, DBOS, LangGraph and apalis, which it installs
	@scripts/setup bench-peers
	$(BENCH) --only compare $(ARGS)

# Part of `make test` too: this prints the figures.
.PHONY: bench-smoke
bench-smoke: postgres with-postgres ## Count statements, round trips and WAL of a step; fail when one grew
	$(WITH_POSTGRES) $(CARGO) test $(BUILD) --test main -- statements:: --nocapture $(ARGS)

# make export-session SESSION_ID=sess_… [SERVER_URL=http://127.0.0.1:7070 TOKEN=…] [FILE=…] [REDACT=1] [GZIP=1]
#
# Without SERVER_URL it reads the database of DATABASE_URL. With one it asks that server, under a token of its
# [server] internal_tokens. A server that listens where you are not is reached by a tunnel, in a shell of its own:
#
#   ssh -N -L 7070:127.0.0.1:7070 HOST
#   aws ssm start-session --target INSTANCE_ID --document-name AWS-StartPortForwardingSession \
#       --parameters portNumber=7070,localPortNumber=7070
#   kubectl --namespace wakeful port-forward service/wakeful 7070:7070
#
# Then SERVER_URL=http://127.0.0.1:7070. Every user of the machine can see TOKEN=… in make's arguments while it runs, and
# your shell's history keeps it. Where that matters, set WAKEFUL_INTERNAL_TOKEN instead, or WAKEFUL_INTERNAL_TOKEN_FILE
# with a path in it.
.PHONY: export-session
export-session: export WAKEFUL_INTERNAL_TOKEN := $(or $(TOKEN),$(WAKEFUL_INTERNAL_TOKEN))
export-session: ## Write a session into a file: SESSION_ID=… [SERVER_URL=… TOKEN=…] [FILE=…]
	@if [ -z "$(GIVEN_SESSION)" ]; then sed -n '/^# make export-session/,/^.PHONY/s/^# \{0,1\}//p' Makefile >&2; exit 2; fi
	@$(CARGO) run -q --locked -p wakeful -- session export "$(GIVEN_SESSION)" \
		$(if $(SERVER_URL),--server "$(SERVER_URL)") $(if $(FILE),--file "$(FILE)") $(if $(REDACT),--redact) $(if $(GZIP),--gzip)

.PHONY: fmt
fmt: ## Format the code
	$(CARGO) fmt --all

.PHONY: fmt-check
fmt-check:
	$(CARGO) fmt --all --check

.PHONY: clippy
clippy: ## Lint every target
	$(CARGO) clippy $(BUILD) --all-targets -- -D warnings

.PHONY: doc
doc: ## Build the documentation
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(BUILD) --no-deps

.PHONY: sqlx
sqlx: postgres ## Rewrite .sqlx from the queries and the migrations
	@scripts/sqlx

.PHONY: postgres
postgres:
	@scripts/setup postgres

.PHONY: pictures
pictures: postgres peers with-postgres ## Draw the pictures in docs/ again, which takes pngquant for small files
	WAKEFUL_PEERS="$$PWD/.peers" WAKEFUL_PICTURES="$$PWD/docs" $(WITH_POSTGRES) \
		$(CARGO) test $(BUILD) --test main -- --ignored peers::pictures $(ARGS)

.PHONY: peers
peers:
	@scripts/setup peers
