//! What an agent's sessions begin with: a folder, a git bundle, a URL.

use crate::support::client::texts;
use crate::support::git::{git, standing};
use crate::support::model::turns_since_user;
use crate::support::{Answer, Database, ModelServer, Options, eventually};
use axum::body::Body;
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::{Notify, watch};

#[tokio::test]
async fn a_session_begins_with_a_copy_of_its_agents_folder_which_any_host_restores() {
    use std::os::unix::fs::PermissionsExt as _;
    let database = Database::new().await;
    let model =
        ModelServer::start(|body, _| match (body.to_string().contains("Again."), turns_since_user(body)) {
            (false, 0) => Answer::call("read_file", json!({"path": "src/main.rs"})),
            (false, 1) => {
                Answer::call("edit_file", json!({"path": "src/main.rs", "old": "one", "new": "two"}))
            }
            (true, 0) => Answer::call("search_files", json!({"pattern": "two|run"})),
            _ => Answer::text("Done."),
        })
        .await;
    let options = Options::new().env("OPENAI_BASE_URL", &model.url);
    let seed = options.path("seed");
    std::fs::create_dir_all(seed.join("src")).unwrap();
    std::fs::create_dir(seed.join("empty")).unwrap();
    std::fs::write(seed.join("src/main.rs"), "one").unwrap();
    std::fs::write(seed.join("run.sh"), "run").unwrap();
    std::fs::set_permissions(seed.join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::symlink("/etc/hostname", seed.join("link")).unwrap();
    let options = options.config(&format!(
        "[agents.default]\nmodel = \"openai/test\"\ntools = [\"read_file\", \"edit_file\", \"search_files\"]\n\
         [agents.default.workspace]\nclone = {:?}",
        seed.display().to_string()
    ));
    // The first worker dies after it has copied the folder, before the commit.
    let dying = options.clone().env("FAILPOINTS", "K30_put=1*return").serve(&database).await;
    let id = dying.client().chat("c1", "Go.").await["session_id"].as_str().unwrap().to_owned();
    assert!(!dying.ended().await.0.success());
    let process = options.serve(&database).await;
    process.client().wait_for(&id, "completed").await;
    assert!(process.terminate().success());
    assert_eq!(std::fs::read_to_string(seed.join("src/main.rs")).unwrap(), "one", "the seed stays as it was");
    // Another host, where the seed is another one by now.
    std::fs::write(seed.join("src/main.rs"), "three").unwrap();
    let elsewhere = options.path("elsewhere");
    let process =
        options.clone().env("WAKEFUL_WORKSPACE__DIR", elsewhere.display().to_string()).serve(&database).await;
    let client = process.client();
    client.chat("c1", "Again.").await;
    let session = client.wait_for(&id, "completed").await;
    let told = texts(&session, "tool");
    assert_eq!(told[0], "one");
    assert_eq!(told[2], "run.sh:1: run\nsrc/main.rs:1: two\n");
    let folder = elsewhere.join(&id);
    let mode = std::fs::metadata(folder.join("run.sh")).unwrap().permissions().mode() & 0o777;
    assert!(folder.join("empty").is_dir() && mode == 0o755);
    assert_eq!(std::fs::read_link(folder.join("link")).unwrap().to_str(), Some("/etc/hostname"));
    let (_, answer) = client.get(&format!("/v1/sessions/{id}/files")).await;
    let paths: Vec<&str> =
        answer["items"].as_array().unwrap().iter().map(|one| one["path"].as_str().unwrap()).collect();
    assert_eq!(paths, ["empty", "link", "run.sh", "src", "src/main.rs"]);
    assert!(process.terminate().success());
}

/// A repository with two branches and a tag, as a bundle.
fn bundle(folder: &Path) -> PathBuf {
    let source = folder.join("source");
    std::fs::create_dir_all(source.join("src")).unwrap();
    git(&source, &["init", "-q", "-b", "trunk"]);
    std::fs::write(source.join("src/main.rs"), "one").unwrap();
    git(&source, &["add", "."]);
    git(&source, &["commit", "-q", "-m", "one"]);
    git(&source, &["checkout", "-q", "-b", "side"]);
    std::fs::write(source.join("b.md"), "b").unwrap();
    git(&source, &["add", "."]);
    git(&source, &["commit", "-q", "-m", "two"]);
    git(&source, &["tag", "v1"]);
    git(&source, &["checkout", "-q", "trunk"]);
    git(&source, &["bundle", "create", "-q", "../seed.bundle", "--all"]);
    folder.join("seed.bundle")
}

async fn model() -> ModelServer {
    ModelServer::start(|body, _| match turns_since_user(body) {
        0 => Answer::call("read_file", json!({"path": "src/main.rs"})),
        _ => Answer::text("Done."),
    })
    .await
}

fn agent(clone: &str) -> String {
    format!(
        "[agents.default]\nmodel = \"openai/test\"\ntools = [\"read_file\"]\n[agents.default.workspace]\nclone = {clone:?}\n"
    )
}

/// What a server of a bundle does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    Fails,
    Silent,
    BreaksOff,
}

/// A server that has one bundle, at any path but `/missing`.
struct Source {
    url: String,
    mood: watch::Sender<Mood>,
    /// Fires when a request comes.
    asked: Arc<Notify>,
}

impl Source {
    async fn start(bundle: Vec<u8>, mood: Mood) -> Source {
        let (mood, moods) = watch::channel(mood);
        let asked = Arc::new(Notify::new());
        let came = Arc::clone(&asked);
        let app = axum::Router::new().fallback(move |uri: Uri| {
            came.notify_one();
            answer(uri, bundle.clone(), moods.clone())
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Source { url, mood, asked }
    }
}

async fn answer(uri: Uri, bundle: Vec<u8>, moods: watch::Receiver<Mood>) -> Response {
    let mood = *moods.borrow();
    if uri.path() == "/missing" {
        return StatusCode::NOT_FOUND.into_response();
    }
    match mood {
        Mood::Well => bundle.into_response(),
        Mood::Fails => StatusCode::SERVICE_UNAVAILABLE.into_response(),
        Mood::Silent => std::future::pending().await,
        Mood::BreaksOff => {
            let size = [(header::CONTENT_LENGTH, bundle.len().to_string())];
            let parts = [Ok(bundle[..100].to_vec()), Err(std::io::Error::other("it breaks off"))];
            (size, Body::from_stream(futures::stream::iter(parts))).into_response()
        }
    }
}

#[tokio::test]
async fn a_session_begins_with_a_git_bundle_of_this_host_or_of_a_url_that_the_web_policy_permits() {
    let (database, model) = (Database::new().await, model().await);
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let source = Source::start(std::fs::read(&bundle).unwrap(), Mood::Well).await;
    let url = &source.url;
    let broken = folder.path().join("broken.bundle");
    std::fs::write(&broken, &std::fs::read(&bundle).unwrap()[..200]).unwrap();
    let (here, of_url) = ("[web]\nprivate_hosts = [\"127.0.0.1\"]\n", format!("{url}/seed.bundle"));
    let rows = [
        (agent(&bundle.display().to_string()), Ok("one")),
        (agent(&of_url) + here, Ok("one")),
        (agent(&of_url), Err("not a public address")),
        (
            agent(&of_url).replace("tools", "web_deny = [\"127.0.0.1\"]\ntools") + here,
            Err("may not be contacted"),
        ),
        (agent(&format!("{url}/missing")) + here, Err("answers with status 404")),
        (agent(&broken.display().to_string()), Err("git refuses it")),
        (
            agent(&folder.path().join("source/src/main.rs").display().to_string()),
            Err("neither a folder nor a git bundle"),
        ),
    ];
    for (number, (config, expected)) in rows.iter().enumerate() {
        let options = Options::new().config(config).env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let client = process.client();
        let id = client.chat(&format!("c{number}"), "Go.").await["session_id"].as_str().unwrap().to_owned();
        let session = client.wait_for(&id, "completed").await;
        let told = &texts(&session, "tool")[0];
        let files = options.path("workspaces");
        match expected {
            Ok(content) => {
                assert_eq!(told, content, "{config}");
                let here = standing(&files.join(&id));
                assert!(here.starts_with("## trunk\n--"), "{here}");
                assert!(here.contains("refs/heads/side") && here.contains("refs/tags/v1"), "{here}");
                // Nothing of this host is in it.
                let config = std::fs::read_to_string(files.join(&id).join(".git/config")).unwrap();
                assert!(!config.contains("remote") && !config.contains('/'), "{config}");
            }
            Err(why) => {
                assert!(told.contains(why), "{config}: {told}");
                assert!(!told.contains(&folder.path().display().to_string()), "a path of the host: {told}");
                assert!(!files.join(&id).exists());
            }
        }
        let left: Vec<_> =
            std::fs::read_dir(files.join(".state")).unwrap().map(|one| one.unwrap().path()).collect();
        let stray = |path: &&PathBuf| path.extension().is_some_and(|end| end == "part" || end == "bundle");
        assert!(left.iter().find(stray).is_none(), "{left:?}");
        assert!(process.terminate().success());
    }
}

/// Every command that says what a step waits for names the place.
async fn is_told(options: &Options, database: &Database, id: &str, place: &str) {
    let told = async |arguments: &[&str]| {
        let args = arguments.iter().map(|one| (*one).to_owned()).collect();
        let (_, ended) = Options { args, ..options.clone() }.spawn(&database.url).ended().await;
        ended.output()
    };
    let why = told(&["session", "why", id]).await;
    assert!(why.contains("has not answered for") && why.contains("fails no run"), "{why}");
    let (status, doctor) = tokio::join!(told(&["queue", "status"]), told(&["doctor"]));
    assert!(status.contains(&format!("Clone of {place} has failed for")), "{status}");
    assert!(doctor.contains(&format!("Clone of {place} has failed for")), "{doctor}");
    assert!(!(why + &status + &doctor).contains("the-secret"));
}

#[tokio::test]
async fn a_url_that_does_not_answer_is_waited_for_and_fails_no_run() {
    let (database, model) = (Database::new().await, model().await);
    let folder = tempfile::tempdir().unwrap();
    let bundle = std::fs::read(bundle(folder.path())).unwrap();
    for (mood, says) in [
        (Mood::Fails, "answers with status 503"),
        (Mood::Silent, "did not answer in time"),
        (Mood::BreaksOff, "connection closed"),
    ] {
        let source = Source::start(bundle.clone(), mood).await;
        let place = format!("{}/seed.bundle", source.url);
        let options = Options::new()
            .config(&format!(
                "[gate]\nprobe_s = 0.2\nprobe_max_s = 0.4\nwave_s = 0.1\n[web]\nprivate_hosts = [\"127.0.0.1\"]\nfirst_byte_s = 1\n{}",
                agent(&format!("{place}?key=the-secret"))
            ))
            .env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let client = process.client();
        let (asked, mut ids) = (model.bodies().len(), Vec::new());
        for chat in ["a", "b"] {
            let sent = client.chat(&format!("{mood:?}-{chat}"), "Go.").await;
            ids.push(sent["session_id"].as_str().unwrap().to_owned());
        }
        for id in &ids {
            let error = eventually("the outage to be shown", || async {
                let job = client.session(id).await["job"].clone();
                let waits = job["waits_for"] == format!("clone of {place}");
                waits.then(|| job["last_error"].as_str().unwrap_or_default().to_owned())
            })
            .await;
            assert!(error.contains(says) && !error.contains("the-secret"), "{mood:?}: {error}");
            assert!(texts(&client.session(id).await, "tool").is_empty(), "the model is told nothing");
        }
        eventually("probes", || async {
            let probes = "select coalesce(max(probes), 0)::bigint from provider_gates where gate_id = $1";
            (database.value::<i64>(probes, &format!("clone of {place}")).await > 1).then_some(())
        })
        .await;
        for id in &ids {
            let job = client.session(id).await["job"].clone();
            assert!(job["stuck"].as_i64().unwrap() <= 1, "an outage is no attempt: {job}");
        }
        if mood == Mood::Fails {
            is_told(&options, &database, &ids[0], &place).await;
        }
        assert!(!process.log().contains("the-secret"));
        source.mood.send_replace(Mood::Well);
        for id in &ids {
            let session = client.wait_for(id, "completed").await;
            assert_eq!(texts(&session, "tool"), ["one"]);
            assert_eq!(session["job"], serde_json::Value::Null);
        }
        assert_eq!(model.bodies().len(), asked + 4, "two calls of the model for each session");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_cancel_while_a_call_waits_for_its_files_leaves_the_proof_that_it_never_ran() {
    let database = Database::new().await;
    let call = Answer::call("write_file", json!({"path": "a.md", "content": "one"}));
    let model = ModelServer::turns(vec![call]).await;
    let source = Source::start(Vec::new(), Mood::Silent).await;
    let config = agent(&format!("{}/seed.bundle", source.url)).replace("read_file", "write_file");
    let options = Options::new()
        .config(&format!("[web]\nprivate_hosts = [\"127.0.0.1\"]\n{config}"))
        .env("OPENAI_BASE_URL", &model.url);
    let process = options.serve(&database).await;
    let client = process.client();
    let id = client.chat("c1", "Write it.").await["session_id"].as_str().unwrap().to_owned();
    let asked = tokio::time::timeout(crate::support::timeout(), source.asked.notified());
    asked.await.expect("the source is asked");
    let status = "select status from tool_calls where session_id = $1";
    assert_eq!(database.value::<String>(status, &id).await, "started", "by the commit of the reply");
    let (cancelled, answer) = client.post(&format!("/v1/sessions/{id}/cancel"), &json!({})).await;
    assert!(cancelled.is_success(), "{answer}");
    client.wait_for(&id, "cancelled").await;
    assert_eq!(database.value::<String>(status, &id).await, "abandoned");
    let uncertain =
        "select count(*) from session_events where session_id = $1 and type = 'TOOL_FAILED_UNCERTAIN'";
    assert_eq!(database.value::<i64>(uncertain, &id).await, 0);
    assert!(process.terminate().success());
}

#[tokio::test]
async fn submodules_and_large_files_that_a_bundle_lacks_are_refused_in_words() {
    let (database, model) = (Database::new().await, model().await);
    for (what, why) in [("submodule", "is a submodule"), ("lfs", "uses Git LFS")] {
        let folder = tempfile::tempdir().unwrap();
        bundle(folder.path());
        let source = folder.path().join("source");
        if what == "lfs" {
            std::fs::write(source.join("src/.gitattributes"), "*.bin filter=lfs diff=lfs\n").unwrap();
            git(&source, &["add", "."]);
        } else {
            let commit = git(&source, &["rev-parse", "HEAD"]);
            git(&source, &["update-index", "--add", "--cacheinfo", &format!("160000,{},lib", commit.trim())]);
        }
        git(&source, &["commit", "-q", "-m", what]);
        git(&source, &["bundle", "create", "-q", "../seed.bundle", "--all"]);
        let options = Options::new()
            .config(&agent(&folder.path().join("seed.bundle").display().to_string()))
            .env("OPENAI_BASE_URL", &model.url);
        let process = options.serve(&database).await;
        let client = process.client();
        let id = client.chat(what, "Go.").await["session_id"].as_str().unwrap().to_owned();
        let told = texts(&client.wait_for(&id, "completed").await, "tool")[0].clone();
        assert!(told.contains(why), "{told}");
        assert!(process.terminate().success());
    }
}

#[tokio::test]
async fn a_worker_without_git_leaves_the_sessions_that_begin_with_a_bundle_to_others() {
    let (database, model) = (Database::new().await, model().await);
    let folder = tempfile::tempdir().unwrap();
    let options = Options::new()
        .config(&agent(&bundle(folder.path()).display().to_string()))
        .env("OPENAI_BASE_URL", &model.url);
    let without = options.clone().env("PATH", "/nonexistent").serve(&database).await;
    let client = without.client();
    let id = client.chat("c1", "Go.").await["session_id"].as_str().unwrap().to_owned();
    eventually("the step to be left to others", || async {
        (client.session(&id).await["job"]["held_by"] == "lacks:default").then_some(())
    })
    .await;
    assert!(model.bodies().is_empty(), "the model was not asked either");
    let doctor = Options { args: vec!["doctor".to_owned()], ..options.clone() };
    let (_, told) = doctor.clone().env("PATH", "/nonexistent").spawn(&database.url).ended().await;
    assert!(told.output().contains("this host has no git"), "{}", told.output());
    let (_, told) = doctor.spawn(&database.url).ended().await;
    assert!(told.output().contains("begins with the git bundle"), "{}", told.output());
    let with = options.serve(&database).await;
    let session = client.wait_for(&id, "completed").await;
    assert_eq!(texts(&session, "tool"), ["one"]);
    // The files are stored, so the worker without git can go on with them.
    assert!(with.terminate().success());
    client.chat("c1", "Again.").await;
    eventually("the second answer", || async {
        (texts(&client.session(&id).await, "tool") == ["one", "one"]).then_some(())
    })
    .await;
    assert!(without.terminate().success());
}
