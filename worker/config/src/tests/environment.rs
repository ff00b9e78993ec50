//! The environment, and secrets that come by it or by files.

use super::*;
use secrecy::ExposeSecret;
use std::fs;

#[test]
fn the_environment_wins_over_the_file_and_own_names_over_it() {
    let text = "[queue]\nlease_s = 60\npoll_ms = 500\n[providers.openai]\nbase_url = \"http://file/v1\"\napi_key = \"f\"\n";
    let config = good(
        text,
        &[
            ("wakeful_queue__Lease_S", "40"),
            ("WAKEFUL_PROVIDERS__OPENAI__BASE_URL", "http://setting/v1"),
            ("WAKEFUL_PROVIDERS__OPENAI__API_KEY", "s"),
            ("OPENAI_API_KEY", "own"),
            ("ANTHROPIC_BASE_URL", "https://own/"),
            ("DATABASE_URL", "postgres://db/own"),
            ("WAKEFUL_DATABASE__URL", "postgres://db/setting"),
            ("wakeful_token", "t"),
            ("WAKEFUL_SERVER__INTERNAL_TOKENS", "one, two"),
        ],
    );
    assert_eq!((config.queue.lease, config.queue.poll_ms), (Duration::from_secs(40), 500));
    assert_eq!(config.providers.openai.base_url.as_deref(), Some("http://setting/v1"));
    assert_eq!(config.providers.openai.api_key.unwrap().expose_secret(), "own");
    assert_eq!(config.providers.anthropic.base_url.as_deref(), Some("https://own"));
    assert_eq!(config.database.url.unwrap().expose_secret(), "postgres://db/own");
    assert_eq!(config.server.token.unwrap().expose_secret(), "t");
    assert_eq!(config.server.internal_tokens.len(), 2);
}

#[test]
fn several_secrets_in_a_variable_have_commas_between_and_no_brackets() {
    let wrong = lines("", &[("WAKEFUL_SERVER__INTERNAL_TOKENS", r#"["one","two"]"#)]);
    assert_eq!(wrong.len(), 1);
    assert!(wrong[0].contains("commas between") && !wrong[0].contains("one\""), "{wrong:?}");
}

#[test]
fn a_variable_finds_names_that_a_shell_cannot_spell() {
    let text = "[agents.Tier-2]\nmodel = \"openai/a\"\n[models.\"openai/gpt-5.1\"]\ninput_usd = 1\n";
    let config = good(
        text,
        &[
            ("WAKEFUL_AGENTS__TIER_2__LIMITS__STEPS", "7"),
            ("WAKEFUL_AGENTS__DEFAULT__MODEL", "scripted/demo"),
            ("WAKEFUL_AGENTS__DEFAULT__TOOLS", "a,b"),
            ("WAKEFUL_MODELS__OPENAI_GPT_5_1__INPUT_USD", "2.5"),
        ],
    );
    assert_eq!(config.agents["Tier-2"].limits.steps, 7);
    assert_eq!(config.agents["Tier-2"].model.as_deref(), Some("openai/a"));
    assert_eq!(config.agents["default"].model.as_deref(), Some("scripted/demo"));
    assert_eq!(config.agents["default"].tools.as_deref(), Some(&["a".to_owned(), "b".to_owned()][..]));
    assert_eq!(config.price("openai/gpt-5.1").input, 2_500_000_000);
}

#[test]
fn a_prefill_is_a_yes_or_a_no_and_only_anthropics_and_others_are_only_openais() {
    let given = |name: &str, value: &str| format!("[models.\"{name}\"]\nprefill = {value}");
    let config = good(&given("anthropic/m", "true"), &[]);
    assert!(config.models["anthropic/m"].prefill && config.warnings.is_empty());
    assert!(!good(&given("anthropic/m", "false"), &[]).models["anthropic/m"].prefill);
    let lines = lines(&given("anthropic/m", "1"), &[]);
    assert!(lines.len() == 1 && lines[0].contains("must be true or false"), "{lines:?}");
    let warned = good(&given("openai/m", "true"), &[]).warnings;
    assert!(warned.len() == 1 && warned[0].contains("prefill has no effect"), "{warned:?}");
    for key in ["merge_turns", "legacy_max_tokens"] {
        let given = |name: &str| good(&format!("[models.\"{name}\"]\n{key} = true"), &[]);
        assert!(given("openai/m").warnings.is_empty());
        let warned = given("anthropic/m").warnings;
        assert!(warned.len() == 1 && warned[0].contains(&format!("{key} has no effect")), "{warned:?}");
    }
}

#[test]
fn reserved_and_empty_variables_are_no_keys() {
    let config = good(
        "",
        &[
            ("WAKEFUL_URL", "http://x"),
            ("WAKEFUL_INTERNAL_TOKEN", "t"),
            ("WAKEFUL_LOG", "debug"),
            ("WAKEFUL_LOG_FORMAT", "json"),
            ("WAKEFUL_TEST_A__B", "1"),
            ("WAKEFUL_MUTANT", "1"),
            ("OPENAI_API_KEY", ""),
            ("WAKEFUL_TOKEN", " "),
            ("WAKEFUL_SERVER__LISTEN", ""),
            ("HOME", "/root"),
        ],
    );
    assert_eq!(config.warnings, Vec::<String>::new());
    assert!(config.providers.openai.api_key.is_none() && config.server.token.is_none());
    let warned = good("", &[("WAKEFUL_QUEUE_LEASE_S", "5")]).warnings;
    assert!(warned.len() == 1 && warned[0].contains("WAKEFUL_QUEUE_LEASE_S"), "{warned:?}");
    assert_eq!(lines("", &[("WAKEFUL_SERVR__TOKEN", "x")]).len(), 1);
}

#[test]
fn a_secret_is_read_from_its_file_and_trimmed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("key");
    fs::write(&path, " sk-1\n").unwrap();
    fs::write(dir.path().join("tokens"), "a\n\n b \n").unwrap();
    let path = path.to_str().unwrap();
    let config = good("", &[("OPENAI_API_KEY_FILE", path), ("WAKEFUL_SERVER__TOKEN_FILE", path)]);
    assert_eq!(config.providers.openai.api_key.unwrap().expose_secret(), "sk-1");
    assert_eq!(config.server.token.unwrap().expose_secret(), "sk-1");

    // In a file, the path is relative to the file.
    fs::write(dir.path().join("w.toml"), "[server]\ntoken_file = \"key\"\ninternal_tokens_file = \"tokens\"")
        .unwrap();
    let config = Config::load(Some(&dir.path().join("w.toml")), vars(&[])).unwrap();
    assert_eq!(config.server.token.unwrap().expose_secret(), "sk-1");
    assert_eq!(config.server.internal_tokens[1].expose_secret(), "b");

    // The environment overrides a secret in the file, even if one gives the secret and the other a path.
    let text = "[server]\ntoken = \"from the file\"";
    assert_eq!(good(text, &[("WAKEFUL_TOKEN_FILE", path)]).server.token.unwrap().expose_secret(), "sk-1");
}

#[test]
fn a_secret_given_twice_or_in_a_missing_file_is_refused() {
    assert_eq!(
        lines("", &[("OPENAI_API_KEY", "sk-1"), ("OPENAI_API_KEY_FILE", "/k")]),
        [
            "OPENAI_API_KEY: providers.openai.api_key and providers.openai.api_key_file (OPENAI_API_KEY_FILE) are both set: keep one"
        ]
    );
    let found = lines("", &[("DATABASE_URL_FILE", "/nowhere/at/all")]);
    assert!(
        found[0].starts_with("DATABASE_URL_FILE: database.url_file: cannot read /nowhere/at/all: "),
        "{found:?}"
    );
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("empty"), "\n").unwrap();
    let found = lines("", &[("WAKEFUL_TOKEN_FILE", dir.path().join("empty").to_str().unwrap())]);
    assert!(found[0].contains("must not be empty"), "{found:?}");
}

#[test]
fn no_secret_is_ever_shown() {
    let env: Env<'_> = &[
        ("DATABASE_URL", "postgres://u:hunter2@h/d"),
        ("WAKEFUL_TOKEN", "hunter2"),
        ("WAKEFUL_SERVER__INTERNAL_TOKENS", "hunter2"),
        ("ANTHROPIC_API_KEY", "hunter2"),
    ];
    assert!(!format!("{:?}", good("", env)).contains("hunter2"));
    let text = "[mcp.cloud]\nurl = \"https://mcp.example.org/hunter2?key=hunter2\"\n";
    let given = good(text, env).given;
    assert!(given.iter().any(|one| one.value == "\"https://mcp.example.org/…\""), "{given:?}");
    assert!(!format!("{given:?}").contains("hunter2"), "{given:?}");
    let bad = lines(
        "[server]\ntoken = 42424242\ninternal_tokens = [424242, 1]\ntokn = \"hunter2\"",
        &[
            ("DATABASE_URL", "mysql://u:hunter2@h"),
            ("OPENAI_API_KEY", "hunter2 with spaces"),
            ("OPENAI_BASE_URL", "http://u:hunter2@h"),
        ],
    );
    assert_eq!(bad.len(), 6, "{bad:#?}");
    assert!(!bad.join("\n").contains("hunter2") && !bad.join("\n").contains("4242"), "{bad:#?}");
}
