//! What a fork can have that differs from its parent: its texts, its settings, and what its calls may do.

use super::*;

#[tokio::test]
async fn an_edited_message_and_a_further_one_are_what_the_fork_answers() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let request = ForkRequest { text: Some("Write to Eve.".into()), ..at(&parent_id, "2") };
    let edited = world.store.fork(&request).await.unwrap();
    assert_eq!((edited.asked_message_number, edited.at_message_number), (2, 1));
    let driver = world.drive(&edited.session_id).await;
    assert_eq!(said(&driver.session.records), [(2, Role::User, [text("Write to Eve.")].as_slice())]);
    assert!(driver.session.state.is_empty());
    agrees(&world, &edited.session_id).await;
    drop(driver);
    world.run_sql("update jobs set run_at = clock_timestamp() + interval '1 hour'").await;

    let both = ForkRequest {
        text: Some("And to Eve.".into()),
        prompt: Some("Be quick.".into()),
        ..at(&parent_id, "last-user")
    };
    let both = world.store.fork(&both).await.unwrap();
    let driver = world.drive(&both.session_id).await;
    let context = wakeful_workflow::context::full(&driver.session, Vec::new());
    let last: Vec<_> =
        context.messages[context.messages.len() - 2..].iter().map(|one| &one.content[0]).collect();
    assert_eq!(last, [&text("And to Eve."), &text("Be quick.")]);
    assert_eq!(driver.session.records.last().unwrap().message_number, 6);
    agrees(&world, &both.session_id).await;
    drop(driver);
    world.run_sql("update jobs set run_at = clock_timestamp() + interval '1 hour'").await;

    let prompted = ForkRequest { prompt: Some("Once more.".into()), ..at(&parent_id, "end") };
    let prompted = world.store.fork(&prompted).await.unwrap();
    let driver = world.drive(&prompted.session_id).await;
    assert_eq!(driver.session.records.last().unwrap().content, [text("Once more.")]);
    assert_eq!(driver.session.records.last().unwrap().message_number, 11);
}

#[tokio::test]
async fn overrides_are_the_forks_own_and_without_any_its_first_bytes_are_its_parents() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let parent = hydrated(&world, &parent_id).await;
    let prefix_of = async |session_id: &str| -> String {
        world
            .database
            .value("select prefix_sha256 from conversation_sessions where session_id = $1", session_id)
            .await
    };
    let blobs = world.count("blobs").await;
    let same = world.store.fork(&resting(&parent_id, "end")).await.unwrap();
    assert_eq!(prefix_of(&same.session_id).await, prefix_of(&parent_id).await);
    assert_eq!(world.count("blobs").await, blobs, "its state is that of the parent's last checkpoint");

    let request = ForkRequest {
        model: Some(Model { id: "other/model".into(), context_window: 7 }),
        tool_mode: Some(ToolMode::Dry),
        ..resting(&parent_id, "5")
    };
    let other = world.store.fork(&request).await.unwrap();
    let child = hydrated(&world, &other.session_id).await;
    assert_eq!((child.policy.model.as_deref(), child.policy.tool_mode), (Some("other/model"), ToolMode::Dry));
    assert_eq!(prefix_of(&other.session_id).await, prefix_of(&parent_id).await);
    let row = world.store.session(None, &other.session_id).await.unwrap();
    assert_eq!(row.model_id, "other/model");
    // A fork of the fork keeps both, unless the request says otherwise.
    let again = world.store.fork(&resting(&other.session_id, "5")).await.unwrap();
    let again = hydrated(&world, &again.session_id).await;
    assert_eq!((again.policy.model.as_deref(), again.policy.tool_mode), (Some("other/model"), ToolMode::Dry));

    let tools = vec![ToolDefinition::new("look", "Looks.", json!({"type": "object"}), Effect::Pure)];
    let request = ForkRequest {
        tools: Some(tools.clone()),
        system_prompt: Some(SystemPromptPatch::Append("Be kind.".into())),
        ..resting(&parent_id, "5")
    };
    let patched = world.store.fork(&request).await.unwrap();
    let child = hydrated(&world, &patched.session_id).await;
    let prefix = child.prefix.as_ref().unwrap();
    assert_eq!((prefix.system.as_str(), &*prefix.tools), ("You are a test.\n\nBe kind.", &tools[..]));
    assert_eq!(child.policy.tools, Some(vec!["look".to_owned()]));
    assert_eq!(child.seeds.len(), 1);
    assert_eq!(wakeful_workflow::context::full(&child, Vec::new()).system, "You are a test.\n\nBe kind.");
    let request = ForkRequest {
        system_prompt: Some(SystemPromptPatch::Replace("Be another.".into())),
        ..resting(&parent_id, "5")
    };
    let replaced = world.store.fork(&request).await.unwrap();
    let child = hydrated(&world, &replaced.session_id).await;
    assert_eq!(wakeful_workflow::context::full(&child, Vec::new()).system, "Be another.");
    assert_eq!(child.prefix.unwrap().tools, parent.prefix.unwrap().tools);
    agrees(&world, &replaced.session_id).await;
}

#[tokio::test]
async fn what_was_only_rehearsed_is_never_taken_for_done() {
    let world = World::new().await;
    let parent_id = two_runs(&world).await;
    let mode =
        |parent: &str, place: &str, mode| ForkRequest { tool_mode: Some(mode), ..resting(parent, place) };
    // The parent sent its mail. The rehearsal's mail was only rehearsed; messages 7 and 8 are its turn.
    let rehearsal = ForkRequest { tool_mode: Some(ToolMode::Dry), ..at(&parent_id, "6") };
    let rehearsal = world.store.fork(&rehearsal).await.unwrap().session_id;
    let mut driver = world.drive(&rehearsal).await;
    driver.continues(Performed::Begun).await;
    driver.sends_mail("call_d").await;
    assert_eq!(driver.commit(replied(vec![text("Written.")])).await, Commit::Closed { opened: false });

    let again = world.store.fork(&resting(&rehearsal, "end")).await.unwrap().session_id;
    assert_eq!(hydrated(&world, &again).await.policy.tool_mode, ToolMode::Dry);
    for of in [&rehearsal, &again] {
        let reason = refused(&world, &mode(of, "end", ToolMode::Live)).await;
        assert!(reason.contains("message 8") && reason.contains("rehearsed"), "{reason}");
        // Cutting before the rehearsal is fine: what the live session did up to there is really done.
        world.store.fork(&mode(of, "6", ToolMode::Live)).await.unwrap();
    }
    let recorded = world.store.fork(&mode(&rehearsal, "6", ToolMode::Recorded)).await.unwrap();
    let replay = hydrated(&world, &recorded.session_id).await.policy.replay.unwrap();
    assert_eq!((replay.source_session_id.as_str(), replay.after_message_number), (rehearsal.as_str(), 6));
}
