//! Which agent, in which space, gets a message that comes in by mail or by a messenger.

use super::problem::{Origin, Problem};
use super::{Config, DEFAULT_AGENT};
use wakeful_workflow::id::DEFAULT_SPACE;

/// What a section says of where its messages go.
pub(super) struct Route {
    pub section: String,
    pub agent: Option<String>,
    pub space: Option<String>,
    pub agent_at: Option<Origin>,
    pub space_at: Option<Origin>,
}

impl Route {
    /// Checks that the agent serves the space. A section that names neither is not checked, because it may not be in use.
    pub fn problem(&self, config: &Config) -> Option<Problem> {
        let (origin, key, value) = match (&self.agent_at, &self.space_at) {
            (Some(at), _) => (at, "agent", &self.agent),
            (None, Some(at)) => (at, "space", &self.space),
            (None, None) => return None,
        };
        // A value that was refused was reported.
        let value = value.as_deref()?;
        let space = self.space.as_deref().unwrap_or(DEFAULT_SPACE);
        let agent = self.agent.as_deref().unwrap_or(DEFAULT_AGENT);
        let known = config.agent_names_in(space);
        if known.contains(agent) {
            return None;
        }
        let known = known.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let section = &self.section;
        let text = format!("{section}.{key} = {value:?}: {}; there are: {known}", no_agent(agent, space));
        Some(Problem::new(origin.clone(), text))
    }
}

/// Says that a space has no such agent.
pub(super) fn no_agent(agent: &str, space: &str) -> String {
    if space == DEFAULT_SPACE {
        format!("there is no agent {agent:?}")
    } else {
        format!("there is no agent {agent:?} in the space {space:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::parse;

    const AGENTS: &str = "[agents.default]\nmodel = \"scripted/x\"\n[agents.acmes]\nmodel = \"scripted/x\"\nspaces = [\"acme\", \"bolt\"]\n";

    #[test]
    fn mail_messengers_and_schedules_name_their_space_and_the_default_one_is_the_default() {
        let config = parse(
            &format!(
                "{AGENTS}[email]\nspace = \"bolt\"\n[email.mailboxes.a]\naddress = \"a@x.org\"\nspace = \"acme\"\nagent = \"acmes\"\n\
                 [email.mailboxes.b]\naddress = \"b@x.org\"\n[messenger.slack]\nspace = \"acme\"\nagent = \"acmes\"\n\
                 [schedules.s]\ncron = \"@daily\"\nprompt = \"Hi.\"\nspace = \"acme\"\nagent = \"acmes\"\n\
                 [schedules.t]\ncron = \"@daily\"\nprompt = \"Hi.\"\n"
            ),
            &[],
        )
        .unwrap();
        let mailboxes = &config.email.incoming.mailboxes;
        assert_eq!(
            (mailboxes[0].space(), mailboxes[1].space(), config.email.space()),
            ("acme", "bolt", "bolt")
        );
        let messenger = &config.messenger;
        assert_eq!(
            (messenger.slack.space(), messenger.telegram.space(), messenger.webhook.space()),
            ("acme", "default", "default")
        );
        assert_eq!(
            (config.schedules["s"].space.as_str(), config.schedules["t"].space.as_str()),
            ("acme", "default")
        );
    }

    #[test]
    fn an_agent_that_does_not_serve_the_space_is_told_with_its_place() {
        for (text, line, reason) in [
            (
                "[messenger.slack]\nagent = \"acmes\"",
                8,
                "messenger.slack.agent = \"acmes\": there is no agent \"acmes\"; there are: default",
            ),
            (
                "[messenger.telegram]\nagent = \"acmes\"\nspace = \"other\"",
                8,
                "messenger.telegram.agent = \"acmes\": there is no agent \"acmes\" in the space \"other\"; there are: default",
            ),
            (
                "[email.mailboxes.a]\naddress = \"a@x.org\"\nagent = \"missing\"\nspace = \"acme\"",
                9,
                "email.mailboxes.a.agent = \"missing\": there is no agent \"missing\" in the space \"acme\"; there are: acmes, default",
            ),
            (
                "[email]\nspace = \"acme\"\n[email.mailboxes.a]\naddress = \"a@x.org\"\nagent = \"missing\"",
                11,
                "email.mailboxes.a.agent = \"missing\": there is no agent \"missing\" in the space \"acme\"; there are: acmes, default",
            ),
            (
                "[schedules.s]\ncron = \"@daily\"\nprompt = \"Hi.\"\nagent = \"acmes\"\nspace = \"other\"",
                10,
                "schedules.s.agent = \"acmes\": there is no agent \"acmes\" in the space \"other\"; there are: default",
            ),
            (
                "[email]\nspace = \"other\"\n[email.mailboxes.a]\naddress = \"a@x.org\"\nagent = \"acmes\"",
                11,
                "email.mailboxes.a.agent = \"acmes\": there is no agent \"acmes\" in the space \"other\"; there are: default",
            ),
            ("[messenger.webhook]\nspace = \"a b\"", 8, "messenger.webhook.space = \"a b\" must be a space"),
        ] {
            let found = parse(&format!("{AGENTS}\n{text}\n"), &[]).expect_err(text).to_string();
            let lines: Vec<&str> = found.lines().collect();
            assert_eq!(lines.len(), 1, "{found}");
            assert!(lines[0].starts_with(&format!("etc/wakeful.toml:{line}: {reason}")), "{found}");
        }
        let only = "[agents.acmes]\nmodel = \"scripted/x\"\nspaces = [\"acme\"]\n";
        for (section, key) in [
            ("[messenger.slack]\nspace = \"acme\"", "messenger.slack"),
            ("[email]\nspace = \"acme\"", "email"),
            ("[email]\nspace = \"acme\"\n[email.mailboxes.a]\naddress = \"a@x.org\"", "email.mailboxes.a"),
        ] {
            let found =
                parse(&format!("{only}{section}\n"), &[]).expect_err("its agent is `default`").to_string();
            let reason = format!(
                "{key}.space = \"acme\": there is no agent \"default\" in the space \"acme\"; there are: acmes"
            );
            assert!(found.contains(&reason), "{found}");
        }
    }
}
