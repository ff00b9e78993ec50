//! An object store that is away, slow, full, that lies and forgets: each is a clear fault, nothing is lost, and sessions go on by
//! themselves. The store is one of this test, which speaks as much of S3 as is needed.

use super::{says, waits_for_a_store};
use crate::support::client::texts;
use crate::support::model::turns_since_user;
use crate::support::{Answer, Client, Database, ModelServer, Options, eventually};
use axum::body::Bytes;
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What the store does to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mood {
    Well,
    /// Every request gets a 503.
    Away,
    /// No request gets an answer.
    Slow,
    /// What is read has other bytes.
    Lies,
    /// What is read is not there.
    Forgets,
    /// Nothing can be written.
    Full,
    /// A write is done, and its answer never comes.
    Mute,
}

struct Bucket {
    mood: Mutex<Mood>,
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl Bucket {
    async fn start() -> (Arc<Bucket>, String) {
        let bucket = Arc::new(Bucket { mood: Mutex::new(Mood::Well), objects: Mutex::default() });
        let serving = Arc::clone(&bucket);
        let app =
            axum::Router::new().fallback(move |method: Method, uri: Uri, headers: HeaderMap, body: Bytes| {
                let bucket = Arc::clone(&serving);
                async move { bucket.answer(&method, uri.path(), &headers, &body).await }
            });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await });
        (bucket, url)
    }

    fn is(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
    }

    fn count(&self) -> usize {
        self.objects.lock().unwrap().len()
    }

    async fn answer(&self, method: &Method, path: &str, headers: &HeaderMap, body: &[u8]) -> Response {
        let mood = *self.mood.lock().unwrap();
        match mood {
            Mood::Away => return (StatusCode::SERVICE_UNAVAILABLE, "away").into_response(),
            Mood::Slow => std::future::pending().await,
            _ => {}
        }
        if *method == Method::PUT {
            if mood == Mood::Full {
                return (StatusCode::INSUFFICIENT_STORAGE, "<Error><Code>NoSpaceLeft</Code></Error>")
                    .into_response();
            }
            let is_new = {
                let mut objects = self.objects.lock().unwrap();
                let is_new = !objects.contains_key(path);
                objects.entry(path.to_owned()).or_insert_with(|| body.to_vec());
                is_new
            };
            if mood == Mood::Mute {
                std::future::pending::<()>().await;
            }
            return if is_new {
                (StatusCode::OK, [(header::ETAG, "\"1\"")]).into_response()
            } else {
                (StatusCode::PRECONDITION_FAILED, "<Error><Code>PreconditionFailed</Code></Error>")
                    .into_response()
            };
        }
        if *method == Method::DELETE {
            self.objects.lock().unwrap().remove(path);
            return StatusCode::NO_CONTENT.into_response();
        }
        let found = self.objects.lock().unwrap().get(path).cloned().filter(|_| mood != Mood::Forgets);
        let Some(mut bytes) = found else {
            return (StatusCode::NOT_FOUND, "<Error><Code>NoSuchKey</Code></Error>").into_response();
        };
        if mood == Mood::Lies {
            bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
        }
        let range = headers
            .get(header::RANGE)
            .and_then(|range| range.to_str().ok()?.strip_prefix("bytes=")?.split_once('-'));
        let (start, end) = range.expect("parts are asked for");
        let (start, end) = (start.parse::<usize>().unwrap(), end.parse::<usize>().unwrap() + 1);
        let (start, end, size) = (start.min(bytes.len()), end.min(bytes.len()), bytes.len());
        let content_range = format!("bytes {start}-{}/{size}", end.max(1) - 1);
        let part = bytes[start..end].to_vec();
        let headers = [
            (header::CONTENT_RANGE, content_range),
            (header::ETAG, "\"1\"".to_owned()),
            (header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT".to_owned()),
        ];
        (StatusCode::PARTIAL_CONTENT, headers, part).into_response()
    }
}

async fn done(client: &Client, id: &str, answers: usize) -> Vec<String> {
    eventually("the answer", || async {
        let session = client.session(id).await;
        assert_ne!(session["status"], "failed", "no fault of a store fails a run");
        let told = texts(&session, "tool");
        (told.len() == answers && session["status"] == "completed").then_some(told)
    })
    .await
}

#[tokio::test]
async fn a_store_that_is_away_slow_full_mute_lying_or_forgetting_is_a_clear_fault_and_nothing_is_lost() {
    let database = Database::new().await;
    let (bucket, url) = Bucket::start().await;
    let model = ModelServer::start(|body, _| {
        let last =
            body["messages"].as_array().into_iter().flatten().rev().find(|message| message["role"] == "user");
        let said = last.map(|message| message["content"].to_string()).unwrap_or_default();
        let name = said.trim_matches('"').split(' ').nth(1).unwrap_or_default().to_owned();
        match (turns_since_user(body), said.contains("write")) {
            (0, true) => {
                Answer::call("write_file", json!({"path": name, "content": format!("I am {name}.")}))
            }
            (0, false) => Answer::call("read_file", json!({"path": name})),
            _ => Answer::text("Done."),
        }
    })
    .await;
    let options = Options::new()
        .model("openai/test")
        .env("OPENAI_BASE_URL", &model.url)
        .env("WAKEFUL_BLOBS__STORE", "s3://files/wakeful")
        .env("WAKEFUL_BLOBS__TIMEOUT_S", "1")
        .env("AWS_ENDPOINT_URL", &url)
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_REGION", "us-east-1")
        .env("AWS_ACCESS_KEY_ID", "key")
        .env("AWS_SECRET_ACCESS_KEY", "the-secret-key");
    let host =
        |name: &str| options.clone().env("WAKEFUL_WORKSPACE__DIR", options.path(name).display().to_string());
    let writer = host("writer").serve(&database).await;
    let client = writer.client();
    let id = says(&client, "c1", "write 0.md").await;
    client.wait_for(&id, "completed").await;
    assert_eq!(bucket.count(), 1);

    // When files are stored.
    let mut answers = 1;
    let written = [
        (Mood::Away, "503"),
        (Mood::Slow, "did not answer within 1 seconds"),
        (Mood::Full, "507"),
        (Mood::Mute, "did not answer within 1 seconds"),
    ];
    for (mood, why) in written {
        bucket.is(mood);
        says(&client, "c1", &format!("write {answers}.md")).await;
        let error = waits_for_a_store(&client, &id).await;
        assert!(
            error.contains(why) && error.contains("blob store s3://files/wakeful is away"),
            "{mood:?}: {error}"
        );
        bucket.is(Mood::Well);
        answers += 1;
        done(&client, &id, answers).await;
        assert_eq!(bucket.count(), answers, "{mood:?}");
    }
    assert!(writer.terminate().success());

    // When another host reads them.
    for (number, (mood, why)) in [
        (Mood::Away, "503"),
        (Mood::Slow, "did not answer within 1 seconds"),
        (Mood::Lies, "holds other bytes than it should"),
        (Mood::Forgets, "has no blob"),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = format!("reader{number}");
        let reader = host(&folder).serve(&database).await;
        let client = reader.client();
        bucket.is(mood);
        says(&client, "c1", "read 0.md").await;
        answers += 1;
        if matches!(mood, Mood::Away | Mood::Slow) {
            let error = waits_for_a_store(&client, &id).await;
            assert!(error.contains(why), "{mood:?}: {error}");
            bucket.is(Mood::Well);
        } else {
            // The store may never have them again. The worker tells the model, which may go on without its files.
            let told = done(&client, &id, answers).await;
            assert!(told.last().unwrap().contains(why), "{mood:?}: {told:?}");
            assert!(!options.path(&folder).join(&id).exists(), "no file is shown");
            bucket.is(Mood::Well);
            says(&client, "c1", "read 0.md").await;
            answers += 1;
        }
        let told = done(&client, &id, answers).await;
        assert!(told.last().unwrap().contains("I am 0.md."), "{mood:?}: {told:?}");
        assert!(reader.terminate().success());
    }
    // A move, while the store takes nothing and while it does not answer.
    let moved = async |env: &[(&str, &str)]| {
        let mut one = Options { args: vec!["blobs".to_owned(), "move".to_owned()], ..options.clone() };
        one.env.extend(env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())));
        let (status, process) = one.spawn(&database.url).ended().await;
        (status.code().unwrap(), process.output() + &process.log())
    };
    let here = [("WAKEFUL_BLOBS__STORE", "postgres"), ("WAKEFUL_BLOBS__ALSO", "s3://files/wakeful")];
    let (code, told) = moved(&here).await;
    assert_eq!((code, bucket.count()), (0, 0), "{told}");
    for mood in [Mood::Full, Mood::Slow] {
        bucket.is(mood);
        let (code, told) = moved(&[]).await;
        assert!(code == 6 && told.contains("the blob store s3://files/wakeful is away"), "{mood:?}: {told}");
    }
    bucket.is(Mood::Well);
    let (code, told) = moved(&[]).await;
    assert_eq!(code, 0, "{told}");
    let everywhere = "select count(*) from blobs where store = $1";
    assert_eq!(database.value::<i64>(everywhere, "s3://files/wakeful").await, bucket.count() as i64);
}
