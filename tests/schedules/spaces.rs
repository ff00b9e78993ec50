//! Schedules of the configuration in several spaces.

use super::*;

/// The spaces of a schedule's sessions, messages, records and firings, and of their deliveries.
async fn spaces(database: &Database, name: &str) -> Option<String> {
    let sql = "select string_agg(distinct of_it.space_id, ' ')
        from schedules c
        join schedule_firings f on f.schedule_id = c.schedule_id
        join conversation_sessions s on s.session_id = f.session_id
        join lateral (
            select c.space_id union all select f.space_id union all select s.space_id
            union all select split_part(s.conversation_id, '/', 1)
            union all select space_id from session_inbox where session_id = s.session_id
            union all select space_id from conversation_records where session_id = s.session_id
            union all select space_id from deliveries where session_id = s.session_id
        ) as of_it on true
        where c.name = $1 and s.status = 'completed'";
    database.value(sql, name).await
}

#[tokio::test]
async fn a_configured_schedule_fires_in_its_space() {
    let database = Database::new().await;
    let model = ModelServer::turns(vec![Answer::text("Nothing is due.")]).await;
    let schedule = |name: &str, more: &str| {
        format!(
            "[schedules.{name}]\ncron = \"* * * * * *\"\nprompt = \"Report.\"\nmail_to = [\"ann@example.org\"]\noverlap = \"skip\"\n{more}"
        )
    };
    let options = Options::new().env("OPENAI_BASE_URL", &model.url).config(&format!(
        "[agents.default]\nmodel = \"openai/test\"\n[agents.acmes]\nmodel = \"openai/test\"\nspaces = [\"acme\"]\n{}{}{}",
        schedule("acmes", "space = \"acme\"\nagent = \"acmes\"\n"),
        schedule("shared", "space = \"bolt\"\nconversation = \"report\"\n"),
        schedule("plain", "conversation = \"report\"\n")
    ));
    let process = options.serve(&database).await;
    for (name, space) in [("acmes", "acme"), ("shared", "bolt"), ("plain", "default")] {
        let found = eventually("a firing that is answered", || spaces(&database, name)).await;
        assert_eq!(found, space, "{name}");
    }
    let seen = async |space: &str| {
        let request = process.client().get_request("/v1/schedules").header("x-wakeful-space", space);
        let schedules: Value = request.send().await.unwrap().json().await.unwrap();
        let items = schedules["items"].as_array().unwrap();
        items.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        (seen("acme").await, seen("bolt").await),
        (vec!["acmes".to_owned()], vec!["shared".to_owned()])
    );
    assert_eq!(seen("default").await, ["plain"]);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn a_schedule_that_moves_to_another_space_is_paused_in_the_one_that_it_leaves() {
    let database = Database::new().await;
    let store = database.store().await;
    let sync = async |space: &str| {
        let in_space = |name: &str| Definition {
            conversation_id: format!("{space}/schedule-{name}"),
            ..definition(name, "@daily")
        };
        store.sync_schedules("eu", &[in_space("moves"), definition("stays", "@daily")], None).await.unwrap()
    };
    let running = async || {
        let mut running = Vec::new();
        for space in ["acme", SPACE] {
            let schedules = store.schedules(space).await.unwrap();
            let here = schedules.into_iter().filter(|one| one.paused_at.is_none());
            running.extend(here.map(|one| format!("{space}/{}", one.definition.name)));
        }
        running.sort();
        running
    };
    assert_eq!(sync("acme").await.withdrawn, Vec::<String>::new());
    assert_eq!(running().await, ["acme/moves", "default/stays"]);
    assert_eq!(sync(SPACE).await.withdrawn, ["moves"]);
    assert_eq!(running().await, ["default/moves", "default/stays"]);
    assert_eq!(sync("acme").await.withdrawn, ["moves"]);
    assert_eq!(running().await, ["acme/moves", "default/stays"]);
}
