//! A browser without JavaScript: it keeps cookies, fills in forms as they stand on a page, and follows where they lead.

use reqwest::{Client, Method, StatusCode, redirect};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

pub(crate) struct Browser {
    client: Client,
    url: String,
    cookies: Mutex<BTreeMap<String, String>>,
    /// Sent with every request, as a proxy would.
    pub headers: Vec<(&'static str, String)>,
}

/// An answer.
pub(crate) struct Page {
    pub status: StatusCode,
    pub html: String,
    pub headers: reqwest::header::HeaderMap,
    /// The address that it was asked for under.
    pub path: String,
}

/// A form as it stands on a page: where it leads, and its hidden fields.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    pub action: String,
    pub fields: Vec<(String, String)>,
}

impl Browser {
    pub fn new(url: &str) -> Browser {
        // The server closes a connection that is silent for ten seconds. One that is about to be closed is not used again.
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .pool_idle_timeout(Duration::from_secs(5))
            .build()
            .expect("a client");
        Browser { client, url: url.to_owned(), cookies: Mutex::default(), headers: Vec::new() }
    }

    pub async fn ask(&self, method: Method, path: &str, body: Option<String>, own: &[(&str, &str)]) -> Page {
        let mut request = self.client.request(method, format!("{}{path}", self.url));
        let cookies = self.cookies.lock().unwrap().clone();
        let cookies: Vec<String> = cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        if !cookies.is_empty() {
            request = request.header("cookie", cookies.join("; "));
        }
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        for (name, value) in own {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.header("content-type", "application/x-www-form-urlencoded").body(body);
        }
        let response = request.send().await.expect("the server answers");
        let (status, headers) = (response.status(), response.headers().clone());
        for set in headers.get_all("set-cookie") {
            let (pair, rules) = set.to_str().unwrap().split_once(';').unwrap();
            let (name, value) = pair.split_once('=').unwrap();
            let mut cookies = self.cookies.lock().unwrap();
            if rules.contains("Max-Age=0") {
                cookies.remove(name);
            } else {
                cookies.insert(name.to_owned(), value.to_owned());
            }
        }
        Page { status, headers, html: response.text().await.expect("a body"), path: path.to_owned() }
    }

    pub fn cookie(&self, name: &str) -> Option<String> {
        self.cookies.lock().unwrap().get(name).cloned()
    }

    pub fn set_cookie(&self, name: &str, value: &str) {
        self.cookies.lock().unwrap().insert(name.to_owned(), value.to_owned());
    }

    pub async fn get(&self, path: &str) -> Page {
        self.ask(Method::GET, path, None, &[]).await
    }

    /// A page below the console's root, which must be there.
    pub async fn open(&self, path: &str) -> Page {
        let page = self.get(&format!("/console{path}")).await;
        assert_eq!(page.status, StatusCode::OK, "{path}: {}", page.html);
        page
    }

    /// Sends a form as this console's own page would, and does not follow its answer.
    pub async fn post(&self, form: &Form, fields: &[(&str, &str)]) -> Page {
        let all = form.fields.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let body = encoded(&all.chain(fields.iter().copied()).collect::<Vec<_>>());
        let origin = self.url.clone();
        let own = if self.headers.iter().any(|(name, _)| *name == "origin") {
            vec![]
        } else {
            vec![("origin", origin.as_str())]
        };
        self.ask(Method::POST, &form.action, Some(body), &own).await
    }

    /// Presses a button: sends the page's form that leads to `action`, and opens the page that it leads to.
    pub async fn press(&self, page: &Page, action: &str, fields: &[(&str, &str)]) -> Page {
        let answer = self.post(&page.form(action), fields).await;
        assert_eq!(answer.status, StatusCode::SEE_OTHER, "{action}: {}", answer.html);
        self.get(&answer.location()).await
    }
}

/// Fields of a form.
pub(crate) fn encoded(fields: &[(&str, &str)]) -> String {
    let byte = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => (byte as char).to_string(),
        _ => format!("%{byte:02X}"),
    };
    let text = |text: &str| text.bytes().map(byte).collect::<String>();
    fields.iter().map(|(name, value)| format!("{}={}", text(name), text(value))).collect::<Vec<_>>().join("&")
}

impl Page {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map(|value| value.to_str().unwrap()).unwrap_or_default()
    }

    pub fn location(&self) -> String {
        self.header("location").split('#').next().unwrap().to_owned()
    }

    pub fn forms(&self) -> Vec<Form> {
        let forms = self.html.split("<form ").skip(1).map(|rest| rest.split("</form>").next().unwrap());
        forms
            .map(|form| {
                let hidden =
                    form.split("<input ").skip(1).filter(|input| input.starts_with("type=\"hidden\""));
                let fields = hidden.map(|input| (attribute(input, "name"), attribute(input, "value")));
                Form { action: attribute(form, "action"), fields: fields.collect() }
            })
            .collect()
    }

    /// The form whose address ends like this.
    pub fn form(&self, action: &str) -> Form {
        let found = self.forms().into_iter().find(|form| form.action.ends_with(action));
        found.unwrap_or_else(|| panic!("{} has no form {action}: {}", self.path, self.html))
    }

    /// The first link whose address contains this.
    pub fn link(&self, part: &str) -> String {
        let mut links = self.html.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
        let found = links.find(|link| link.contains(part));
        found
            .unwrap_or_else(|| panic!("{} has no link to {part}: {}", self.path, self.html))
            .replace("&#38;", "&")
            .replace("&amp;", "&")
    }

    /// The tags of the page, each with the names of its attributes. What stands in quotes is a value.
    pub fn tags(&self) -> std::collections::BTreeSet<String> {
        let tag = |rest: &str| {
            let inside: String = rest.split('"').step_by(2).collect();
            inside.split('>').next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        self.html.split('<').skip(1).map(tag).collect()
    }
}

fn attribute(tag: &str, name: &str) -> String {
    let after = tag.split(&format!("{name}=\"")).nth(1).unwrap_or_default();
    let value = after.split('"').next().unwrap_or_default();
    let pairs = [("&#34;", "\""), ("&#39;", "'"), ("&#60;", "<"), ("&#62;", ">"), ("&#38;", "&")];
    pairs.iter().fold(value.to_owned(), |text, (escaped, plain)| text.replace(escaped, plain))
}
