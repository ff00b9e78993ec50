//! A server with a token, and requests under other tokens.

use crate::support::{Answer, Database, ModelServer, Options, Process, documented};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};

/// The token of the configuration.
pub(crate) const TOKEN: &str = "the-configured-token-of-the-tests";

/// A bearer token.
pub(crate) type As = String;

pub(crate) struct Stage {
    pub database: Database,
    pub process: Process,
    pub options: Options,
    _model: ModelServer,
}

impl Stage {
    pub async fn new(config: &str) -> Stage {
        Stage::on(Database::new().await, config, Some(TOKEN)).await
    }

    pub async fn on(database: Database, config: &str, token: Option<&str>) -> Stage {
        let model = ModelServer::turns(vec![Answer::text("Hello.")]).await;
        let mut options = Options::new().env("OPENAI_BASE_URL", &model.url).config(&format!(
            "[agents.default]\nmodel = \"openai/test\"\nsystem_prompt = \"You are a test.\"\n{config}"
        ));
        if let Some(token) = token {
            options = options.env("WAKEFUL_TOKEN", token);
        }
        // As in production: row-level security binds this role, and not the superuser that the commands log in as.
        database.with_roles().await;
        let process = options.spawn(&database.as_role("wakeful_runtime"));
        process.wait_for_log("\"Listening\"").await;
        Stage { database, process, options, _model: model }
    }

    /// Runs a command of the command line, and returns what it prints.
    pub async fn run(&self, args: &[&str]) -> Value {
        let (status, output) = self.try_run(args).await;
        assert!(status.success(), "{args:?}: {output}");
        output
    }

    pub async fn try_run(&self, args: &[&str]) -> (std::process::ExitStatus, Value) {
        let mut command = self.options.clone();
        command.args = args.iter().map(|arg| (*arg).to_owned()).chain(["-o".into(), "json".into()]).collect();
        let (status, ended) = command.spawn(&self.database.url).ended().await;
        let text = if status.success() { ended.output() } else { ended.log() };
        (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }

    /// A token that `wakeful token create` made.
    pub async fn token(&self, args: &[&str]) -> As {
        let made = self.run(&[&["token", "create"], args].concat()).await;
        made["token"].as_str().expect("the token is shown").to_owned()
    }

    /// A token of a user, for which the application's token asks.
    pub async fn user(&self, token: &str, user_id: &str) -> As {
        let (status, made) = self.post(token, "/v1/user-tokens", &json!({"user_id": user_id})).await;
        assert_eq!(status, StatusCode::CREATED, "{made}");
        made["token"].as_str().expect("the token is shown").to_owned()
    }

    pub async fn execute(&self, sql: &'static str) {
        sqlx::query(sql).execute(&self.database.pool).await.expect(sql);
    }

    pub fn request(&self, token: &str, method: Method, path: &str) -> RequestBuilder {
        crate::support::http().request(method, format!("{}{path}", self.process.url())).bearer_auth(token)
    }

    pub async fn get(&self, token: &str, path: &str) -> (StatusCode, Value) {
        send(self.request(token, Method::GET, path)).await
    }

    pub async fn post(&self, token: &str, path: &str, body: &Value) -> (StatusCode, Value) {
        send(self.request(token, Method::POST, path).body(body.to_string())).await
    }

    /// Posts a chat message that must be accepted, and returns the session's id.
    pub async fn chat(&self, token: &str, conversation: &str, body: Value) -> String {
        let (status, woken) = self.post(token, &format!("/v1/chat/{conversation}/messages"), &body).await;
        assert_eq!(status, StatusCode::ACCEPTED, "{woken}");
        woken["session_id"].as_str().expect("an id").to_owned()
    }
}

pub(crate) async fn send(request: RequestBuilder) -> (StatusCode, Value) {
    let (client, request) = request.build_split();
    let request = request.expect("a request");
    let (method, path) = (request.method().clone(), request.url().path().to_owned());
    let response = client.execute(request).await.expect("the server answers");
    let status = response.status();
    let text = response.text().await.expect("a body");
    let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
    documented::check(&method, &path, status, &body);
    (status, body)
}

/// The sentence of a problem.
pub(crate) fn problem(body: &Value) -> &str {
    body["detail"].as_str().unwrap_or_default()
}
