mod environment;

use super::*;
use wakeful_workflow::agent::{Agent, Limits};
use wakeful_workflow::strategy::Strategy;

type Env<'a> = &'a [(&'a str, &'a str)];

fn vars(env: Env<'_>) -> impl Iterator<Item = (String, String)> {
    env.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
}

pub(super) fn parse(text: &str, env: Env<'_>) -> Result<Config, ConfigError> {
    Config::parse(text, Some(PathBuf::from("etc/wakeful.toml")), &vars(env).collect(), &[])
}

fn good(text: &str, env: Env<'_>) -> Config {
    parse(text, env).unwrap_or_else(|error| panic!("{error}"))
}

fn lines(text: &str, env: Env<'_>) -> Vec<String> {
    parse(text, env).expect_err("should be refused").lines().collect()
}

#[test]
fn nothing_given_is_the_defaults() {
    let config = good("", &[]);
    assert_eq!(config.server.listen.to_string(), "127.0.0.1:7070");
    assert_eq!(
        config.queue,
        Queue {
            lease: Duration::from_secs(30),
            heartbeat: Duration::from_secs(10),
            poll_ms: 1000,
            concurrency: 64,
            slice_steps: 8,
            heal_s: 30,
            search_s: 2,
            drain: Duration::from_secs(20),
            database_faults: Duration::from_secs(900),
            warm_mb: 64
        }
    );
    assert!(config.server.token.is_none() && config.database.url.is_none() && config.agents.is_empty());
    assert!(
        config.scripted.dir.is_none() && config.email.maildir.is_none() && config.workspace.dir.is_none()
    );
}

#[test]
fn the_example_loads_and_shows_the_defaults() {
    let shown = good(Config::example(), &[]);
    let default = good("", &[]);
    let debug = |config: &Config| {
        let Config { server, database, queue, providers, email, .. } = config;
        format!("{server:?} {database:?} {queue:?} {providers:?} {email:?}")
    };
    assert_eq!(debug(&shown), debug(&default));
    assert_eq!(shown.scripted, default.scripted);
    assert_eq!(format!("{:?}", shown.email), format!("{:?}", default.email));
    assert_eq!(shown.workspace, default.workspace);
    let agent = |mut config: Config| {
        config.fallback_model = Some("scripted/demo".to_owned());
        config.agent(DEFAULT_AGENT).unwrap()
    };
    assert_eq!(agent(shown), agent(default));
}

#[test]
fn what_the_example_leaves_out_is_taken_too() {
    // Lines such as `# key = value`, which a reader will uncomment. Skips the other ways to send mail,
    // because the example uses maildir, and sections that need a secret of the reader's own.
    let mut other_way = false;
    let uncommented: String = Config::example()
        .lines()
        .map(|line| {
            let skipped = ["# [email.smtp]", "# [email.dkim]", "# [encryption]", "# [[notify]]"];
            other_way = line.starts_with('#') && other_way || skipped.contains(&line);
            if other_way {
                return format!("{line}\n");
            }
            let body = line.strip_prefix("# ").unwrap_or(line);
            let key = body.split(" = ").next().unwrap_or_default();
            let is_key = body.contains(" = ") && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
            let tables = [
                "[models.",
                "[schedules.",
                "[email.mailboxes.",
                "[absurd.",
                "[mcp.",
                "[agents.default.workspace",
                "[retention.spaces.",
            ];
            let is_table = tables.iter().any(|table| body.starts_with(table));
            // A program without the optional feature refuses this key.
            let is_taken = key != "redis_url" || cfg!(feature = "legacy-redis");
            // A secret and its file exclude each other, and the files do not exist here.
            if (is_key || is_table) && is_taken && !key.ends_with("_file") {
                format!("{body}\n")
            } else {
                format!("{line}\n")
            }
        })
        .collect();
    let config = good(&uncommented, &[]);
    assert_eq!(config.models["anthropic/claude-sonnet-5"].context_window, Some(200_000));
    assert!(config.models["anthropic/claude-sonnet-5"].prefill);
    assert_eq!(config.schedules["morning"].time_zone, "Europe/Berlin");
    assert_eq!(config.herald.agent.as_deref(), Some("default"));
    assert_eq!(config.server.internal_tokens.len(), 1);
    assert_eq!(config.email.from.as_deref(), Some("agent@example.org"));
    assert_eq!(config.email.incoming.mailboxes[0].address, "support@example.org");
    assert_eq!(config.scripted.dir, Some(PathBuf::from("etc/scenarios")));
}

#[test]
fn every_problem_is_reported_with_its_place_key_value_and_rule() {
    let text = r#"
[server]
listen = "localhost"
lisen = 1

[queue]
lease_s = "30"
concurrency = 0
heartbeat = 3

[agents.support]
model = "gpt-5"
on_uncertain = "retry"
tools = "read_file"
limits = { step = 5, steps = 0 }

[models."mistral/large"]
input_usd = -1

[models."openai/gpt-5"]
output_usd = 0.0000001

[qeue]
lease_s = 1
"#;
    assert_eq!(
        lines(text, &[("WAKEFUL_QUEUE__POLL_MS", "soon"), ("WAKEFUL_QUEUE__POL_MS", "5")]),
        [
            r#"etc/wakeful.toml:3: server.listen = "localhost" must be an address and a port, such as 127.0.0.1:7070 or [::]:7070"#,
            "etc/wakeful.toml:4: unknown key server.lisen; did you mean server.listen?",
            r#"etc/wakeful.toml:7: queue.lease_s = "30" must be a number of seconds from 0.5 to 3600 with at most 3 decimal places"#,
            "etc/wakeful.toml:8: queue.concurrency = 0 must be a whole number from 1 to 1024",
            "etc/wakeful.toml:9: unknown key queue.heartbeat; did you mean queue.heartbeat_s?",
            r#"etc/wakeful.toml:12: agents.support.model = "gpt-5" must be provider/model with a provider of: anthropic, openai, scripted"#,
            r#"etc/wakeful.toml:13: agents.support.on_uncertain = "retry" must be tell_model or needs_attention"#,
            r#"etc/wakeful.toml:14: agents.support.tools = "read_file" must be a list of texts, such as ["a", "b"]"#,
            "etc/wakeful.toml:15: agents.support.limits.steps = 0 must be a whole number from 1 to 10000",
            "etc/wakeful.toml:15: unknown key agents.support.limits.step; did you mean agents.support.limits.steps?",
            r#"etc/wakeful.toml:17: models."mistral/large": the name must be provider/model with a provider of: anthropic, openai, scripted"#,
            r#"etc/wakeful.toml:18: models."mistral/large".input_usd = -1 must be US dollars per million tokens from 0 to 1000000 with at most 6 decimal places, such as 0.25"#,
            r#"etc/wakeful.toml:21: models."openai/gpt-5".output_usd = 0.0000001 must be US dollars per million tokens from 0 to 1000000 with at most 6 decimal places, such as 0.25"#,
            "etc/wakeful.toml:23: unknown key qeue; did you mean queue?",
            "WAKEFUL_QUEUE__POLL_MS: queue.poll_ms = \"soon\" must be a whole number from 10 to 3600000",
            "WAKEFUL_QUEUE__POL_MS: unknown key queue.pol_ms; did you mean queue.poll_ms?",
        ]
    );
}

#[test]
fn a_key_that_resembles_none_is_told_which_there_are() {
    assert_eq!(
        lines("[scripted]\nzzz = 1", &[]),
        ["etc/wakeful.toml:2: unknown key scripted.zzz; known here: dir"]
    );
}

#[test]
fn a_section_that_is_a_value_and_a_value_that_is_a_section_are_problems() {
    let found = lines("queue = 5\n[server.listen]\na = 1", &[("WAKEFUL_QUEUE__LEASE_S", "5")]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("queue must be a section"), "{found:?}");
    assert!(found[1].contains("server.listen = {…} must be an address"), "{found:?}");
}

#[test]
fn a_heartbeat_that_is_too_slow_for_its_lease_is_refused() {
    assert_eq!(
        lines("[queue]\nlease_s = 30\nheartbeat_s = 16", &[]),
        [
            "etc/wakeful.toml:3: queue.heartbeat_s = 16 must be at most half of queue.lease_s = 30, or one late beat loses the lease"
        ]
    );
    assert_eq!(good("[queue]\nlease_s = 30\nheartbeat_s = 15", &[]).queue.heartbeat, Duration::from_secs(15));
    // If the lease is shortened, the default of the heartbeat is shortened too.
    for (lease_s, heartbeat_ms) in [("300", 10_000), ("9", 3_000), ("5", 1_000), ("2", 1_000), ("0.6", 300)] {
        let heartbeat = good("", &[("WAKEFUL_QUEUE__LEASE_S", lease_s)]).queue.heartbeat;
        assert_eq!(heartbeat, Duration::from_millis(heartbeat_ms), "of a lease of {lease_s} s");
    }
    let queue = good("[queue]\nlease_s = 0.6\nheartbeat_s = 0.25", &[]).queue;
    assert_eq!((queue.lease, queue.heartbeat), (Duration::from_millis(600), Duration::from_millis(250)));
    // A lease that is itself refused gives one line, not two.
    assert_eq!(lines("[queue]\nlease_s = 9999\nheartbeat_s = 16", &[]).len(), 1);
}

#[test]
fn text_that_is_not_toml_is_located_without_being_quoted() {
    let found = lines("[server]\n\ntoken = \"hunter2\n", &[]);
    assert!(found[0].starts_with("etc/wakeful.toml:3: not TOML: "), "{found:?}");
    assert!(!found.join("").contains("hunter2"), "{found:?}");
}

#[test]
fn a_named_file_must_exist() {
    let missing = Path::new("/nowhere/wakeful.toml");
    let error = Config::load(Some(missing), vars(&[])).unwrap_err().to_string();
    assert!(error.contains("cannot read /nowhere/wakeful.toml (--config): "), "{error}");
    let error = Config::load(None, vars(&[("WAKEFUL_CONFIG", "/nowhere/w.toml")])).unwrap_err().to_string();
    assert!(error.contains("cannot read /nowhere/w.toml (WAKEFUL_CONFIG): "), "{error}");
    assert!(Config::load(None, vars(&[])).unwrap().file.is_none());
}

#[test]
fn a_model_may_come_from_a_provider_that_the_program_adds() {
    let text = "[agents.default]\nmodel = \"echo/loud\"\n[models.\"echo/loud\"]\ncontext_window = 1000";
    let load = |providers: &[&str]| Config::parse(text, None, &BTreeMap::new(), providers);
    assert_eq!(load(&["echo"]).unwrap().agent(DEFAULT_AGENT).unwrap().model, "echo/loud");
    let error = load(&["other"]).unwrap_err().to_string();
    assert!(error.contains("a provider of: anthropic, openai, scripted, other"), "{error}");
}

#[test]
fn the_built_in_agent_takes_the_model_of_the_key_that_is_set() {
    let model = |env: Env<'_>| good("", env).agent(DEFAULT_AGENT).map(|agent| agent.model);
    assert_eq!(model(&[("ANTHROPIC_API_KEY", "a"), ("OPENAI_API_KEY", "o")]), Ok(ANTHROPIC_MODEL.to_owned()));
    assert_eq!(model(&[("OPENAI_API_KEY", "o")]), Ok(OPENAI_MODEL.to_owned()));
    assert_eq!(model(&[]), Err(AgentError::NoModel { name: "default".to_owned() }));
    let dev = Config { fallback_model: Some("scripted/demo".to_owned()), ..good("", &[]) };
    let agent = dev.agent(DEFAULT_AGENT).unwrap();
    assert_eq!((agent.model.as_str(), agent.limits), ("scripted/demo", Limits::default()));
    assert_eq!(agent.tools, DEFAULT_TOOLS);
}

#[test]
fn a_configured_agent_is_given_as_configured() {
    let text = r#"
[agents.support]
system_prompt = "Help."
model = "openai/vendor/model-1"
tools = []
on_uncertain = "needs_attention"
journal = "checkpoint"
[agents.support.limits]
steps = 3
tool_s = 5
[agents.support.context]
strategy = "sliding_window"
high = 30
"#;
    let config = good(text, &[]);
    let agent = config.agent("support").unwrap();
    assert_eq!(
        agent,
        Agent {
            name: "support".to_owned(),
            system_prompt: "Help.".to_owned(),
            model: "openai/vendor/model-1".to_owned(),
            fallback: Vec::new(),
            tools: Vec::new(),
            approve: Vec::new(),
            limits: Limits { steps: 3, tool_s: 5, ..Limits::default() },
            on_uncertain: OnUncertain::NeedsAttention,
            on_empty_reply: wakeful_workflow::agent::OnEmptyReply::default(),
            journal: JournalLevel::Checkpoint,
            recipients: vec!["participants".to_owned()],
            web: WebPolicy::default(),
            context: ContextPolicy {
                strategy: Strategy::SlidingWindow,
                high: 30,
                low: 20,
                ..ContextPolicy::default()
            },
        }
    );
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert_eq!(
        config.agent("suport").unwrap_err().to_string(),
        r#"there is no agent "suport"; the configuration has: support"#
    );
}

#[test]
fn serve_is_told_everything_that_is_missing() {
    let error = good("", &[("WAKEFUL_SERVER__LISTEN", "0.0.0.0:80")])
        .check_serve(true, true)
        .unwrap_err()
        .to_string();
    assert_eq!(error.lines().count(), 3, "{error}");
    for part in ["DATABASE_URL", "WAKEFUL_TOKEN", "ANTHROPIC_API_KEY"] {
        assert!(error.contains(part), "{error}");
    }
    let database = ("DATABASE_URL", "postgres://h/d");
    let keyless = good("[agents.a]\nmodel = \"openai/x\"", &[database]);
    assert!(keyless.check_serve(true, true).unwrap_err().to_string().contains("OPENAI_API_KEY is not set"));
    let local =
        good("[agents.a]\nmodel = \"openai/x\"", &[database, ("OPENAI_BASE_URL", "http://localhost:1")]);
    assert_eq!(local.check_serve(true, true), Ok(()));
}

#[test]
fn a_token_that_can_be_guessed_is_refused_with_a_way_to_make_one() {
    let base = [("DATABASE_URL", "postgres://h/d"), ("ANTHROPIC_API_KEY", "k")];
    for (name, token, good_enough) in [
        ("WAKEFUL_TOKEN", "guessed", false),
        ("WAKEFUL_TOKEN", "fifteen letters", false),
        ("WAKEFUL_TOKEN", "sixteen letters.", true),
        ("WAKEFUL_SERVER__INTERNAL_TOKENS", "a token that is long enough,short", false),
    ] {
        let checked = good("", &[base[0], base[1], (name, token)]).check_serve(true, true);
        assert_eq!(checked.is_ok(), good_enough, "{name} {token}: {checked:?}");
        if let Err(error) = checked {
            assert!(
                error.to_string().contains("openssl rand") && !error.to_string().contains(token),
                "{error}"
            );
        }
    }
}

#[test]
fn a_context_is_refused_that_could_not_work() {
    let refused = |context: &str| {
        let text = format!("[agents.a]\nmodel = \"openai/x\"\n[agents.a.context]\n{context}");
        let error = Config::parse(&text, None, &BTreeMap::new(), &[]).expect_err(context).to_string();
        assert_eq!(error.lines().count(), 1, "{error}");
        error
    };
    assert!(
        refused("strategy = \"window\"")
            .contains("must be full, sliding_window, trim_tool_results or compaction")
    );
    assert!(
        refused("high = 50\nlow = 50")
            .contains("agents.a.context.low = 50 must be less than agents.a.context.high = 50")
    );
    assert!(refused("low = 80").contains("must be less than"));
    assert!(refused("compact_at_percent = 99").contains("from 10 to 95"));
    assert!(refused("keep = 3").contains("did you mean agents.a.context.keep_results?"));
    let config = good("[models.\"openai/a\"]\ncontext_window = 5", &[]);
    assert_eq!((config.context_window("openai/a"), config.context_window("openai/b")), (5, 128_000));
}

#[test]
fn a_model_without_a_price_costs_nothing_and_says_so() {
    let config = good("[models.\"openai/a\"]\ninput_usd = 0\n[models.\"openai/b\"]\ncontext_window = 5", &[]);
    assert!(config.has_price("openai/a") && !config.has_price("openai/b") && !config.has_price("openai/c"));
    assert_eq!(config.price("openai/c"), Price::default());
}
