//! The part of the matrix that is about the command line. The commands log in as a superuser, and row-level security does
//! not bind it: so this tries the conditions of the commands themselves.

use super::{Names, OTHER, OWN, Stage};
use futures::{StreamExt, stream};
use std::collections::BTreeSet;

/// Commands that are about no row of a space, and why.
const OF_THE_INSTALLATION: [(&str, &str); 17] = [
    ("dev", "its own database"),
    ("demo", "its own database"),
    ("serve", "answers for all spaces"),
    ("migrate", "the schema"),
    ("doctor", "the installation"),
    ("ready", "asks the process of this host"),
    ("absurd", "brings tasks into the space default"),
    ("config", "the configuration"),
    ("encryption", "one key store for all spaces"),
    ("mcp", "the configuration's servers and their files"),
    ("pause", "operators of the installation pause what they name"),
    ("worker", "processes work for all spaces"),
    ("completions", "the command line"),
    ("man", "the command line"),
    ("audit delete", "by age, in the role of an auditor"),
    ("queue", "one queue for all spaces: it refuses --space"),
    ("token revoke", "tried with the tokens, in access::tokens"),
];

/// The arguments of each command, with the names of a space.
fn arguments(command: &str, names: &Names) -> Option<Vec<String>> {
    let Names { session, delivery, conversation, schedule, .. } = names;
    let effect = format!("{session}/call_bolt");
    let arguments: &[&str] = match command {
        "session list" => &["--conversation", conversation],
        "effect resolve" => &[&effect, "--happened", "x", "--yes", "--no-wait"],
        "batch list" | "effect list" | "errors list" | "mail list" | "retention plan" => &[],
        "retention run" | "blobs gc" | "blobs move" | "blobs status" | "blobs verify"
        | "notification list" => &[],
        "notification show" | "notification resend" => &["ntf_x"],
        "batch show" | "batch members" | "batch pause" | "batch resume" | "batch cancel" | "batch wait" => {
            &["batch_x"]
        }
        "errors show" | "errors mute" => &["0123456789abcdef"],
        "errors note" => &["0123456789abcdef", "x"],
        "session show" | "session tail" | "session retry" | "session cancel" | "session tree"
        | "session archive" | "session terminate" | "session wake" | "session why" | "session context"
        | "session recover" | "session verify" => &[session],
        "session files" => &[session],
        "session checkout" => &[session, "out"],
        "session send" => &[session, "Hi"],
        "session new" => &[conversation],
        "session resolve" => &[session, "call_bolt", "--happened", "x"],
        "session approve" | "session decline" => &[session, "call_bolt"],
        "session fork" => &[session, "--at", "last-user"],
        "session export" => &[session, "--file", "-"],
        "session import" => &["no-bundle.jsonl"],
        "session diff" => &[session, session],
        "conversation sessions" | "conversation history" => &[conversation],
        "conversation erase" => &[conversation, "--dry-run"],
        "conversation hold" => &[conversation, "--reason", "x"],
        "conversation holds" | "schedule list" | "token list" | "audit list" | "delivery list" => &[],
        "conversation release" => &["hold_x"],
        "person erase" => &["ann", "--dry-run"],
        "person hold" => &["bob", "--reason", "x"],
        "delivery show" | "delivery resend" => &[delivery],
        "replay" => &[session, "--model", "recorded", "--tools", "recorded"],
        "schedule show" | "schedule delete" | "schedule pause" | "schedule resume" | "schedule trigger"
        | "schedule next" => &[schedule],
        "schedule create" => &[schedule, "--cron", "30 4 1 1 *", "--prompt", "p"],
        "schedule edit" => &[schedule, "--prompt", "q"],
        "token create" => &["--scope", "read"],
        "trigger email" => &["no-mail.eml"],
        "trigger chat" => &["Hi", "--conversation", conversation],
        "trigger cron" => &[schedule],
        "trigger message" => &["Hi", "--via", "webhook"],
        "trigger herald" => &["no-notice.json"],
        "preflight" => &["--against", "wakeful.toml"],
        _ => return None,
    };
    Some(arguments.iter().map(|one| (*one).to_owned()).collect())
}

/// What a command printed, and its exit status.
async fn run(stage: &Stage, arguments: &[String]) -> (i32, String) {
    let mut command = stage.options.clone();
    command.args = arguments.to_vec();
    if arguments[0] == "trigger" {
        command = command.env("WAKEFUL_URL", stage.process.url());
    }
    let (status, ended) = command.spawn(&stage.database.url).ended().await;
    (status.code().expect("it was not killed"), format!("{}{}", ended.output(), ended.log()))
}

/// The commands that the help names, down to their verbs.
async fn commands(stage: &Stage) -> Vec<String> {
    let listed = |help: &str| -> Vec<String> {
        let section = help.split("Commands:\n").nth(1).unwrap_or_default();
        let lines = section.lines().take_while(|line| line.starts_with("  "));
        let names = lines.filter_map(|line| {
            line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
        });
        names.filter(|name| *name != "help").map(str::to_owned).collect()
    };
    let mut commands = Vec::new();
    for noun in listed(&run(stage, &["--help".to_owned()]).await.1) {
        let verbs = listed(&run(stage, &[noun.clone(), "--help".to_owned()]).await.1);
        if verbs.is_empty() || OF_THE_INSTALLATION.iter().any(|(known, _)| *known == noun) {
            commands.push(noun);
        } else {
            commands.extend(verbs.into_iter().map(|verb| format!("{noun} {verb}")));
        }
    }
    commands
}

#[tokio::test]
async fn no_command_with_a_space_tells_or_changes_anything_of_another() {
    let stage = Stage::new().await;
    let whole = std::env::var_os("WAKEFUL_TRIAL").is_some();
    let commands = commands(&stage).await;
    assert!(commands.len() > 40, "the help is read: {commands:?}");
    let of_the_installation: BTreeSet<&str> = OF_THE_INSTALLATION.iter().map(|(name, _)| *name).collect();
    let (before, none) = (stage.rows_of_the_other().await, Names::none());
    let found: Vec<String> = stream::iter(&commands)
        .filter(|command| std::future::ready(!of_the_installation.contains(command.as_str())))
        .map(|command| {
            let (stage, none) = (&stage, &none);
            async move {
                let with = |names: &Names| -> Vec<String> {
                    let given = arguments(command, names)
                        .unwrap_or_else(|| panic!("`wakeful {command}` is new: give it arguments here"));
                    let noun = command.split(' ').map(str::to_owned);
                    noun.chain(given).chain(["--space".to_owned(), OWN.to_owned()]).collect()
                };
                let mut found = Vec::new();
                let of_other = run(stage, &with(&stage.other)).await;
                // Each command starts a process, so without `make trial` only these are started.
                let mut others = vec![(with(&stage.other), of_other.clone())];
                if whole {
                    let of_none = run(stage, &with(none)).await;
                    let same = stage.other.blank(&of_other.1) == none.blank(&of_none.1);
                    if of_other.0 != of_none.0 || !(same || of_other.0 == 0) {
                        found.push(format!("{command}: an id of another space is not as unknown as any: {of_other:?} {of_none:?}"));
                    }
                    others.push((with(&stage.own), run(stage, &with(&stage.own)).await));
                }
                for (arguments, (code, said)) in others {
                    let shown = stage.other.marks.iter();
                    let shown: Vec<&String> = shown
                        .filter(|mark| said.contains(mark.as_str()) && !arguments.iter().any(|one| one.contains(mark.as_str())))
                        .collect();
                    if !shown.is_empty() || code == 101 {
                        found.push(format!("{command}: {code}, shows {shown:?}: {said}"));
                    }
                }
                found
            }
        })
        .buffer_unordered(4)
        .concat()
        .await;
    assert!(found.is_empty(), "{found:#?}");
    assert_eq!(stage.rows_of_the_other().await, before, "the rows of {OTHER} are as they were");
    println!("{} commands", commands.len());
}
