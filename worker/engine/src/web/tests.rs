//! Tests: what a fetch may reach, with a resolver of the test's own and servers on this machine. In these tests 127.0.0.2
//! plays a public address.

use super::fetch::{Unsaved, Web, WebError, WebRequest};
use super::resolver::Resolver;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use wakeful_config::web::Web as Settings;
use wakeful_workflow::policy::WebPolicy;
use wiremock::matchers::{header_exists, method, path};
use wiremock::{Mock, MockServer, ResponseTemplate};

const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
const PRIVATE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Answers with one list of addresses after the other, and then always with the last one.
struct Names {
    answers: Mutex<Vec<Vec<IpAddr>>>,
    asked: AtomicUsize,
}

impl Names {
    fn new(answers: &[&[IpAddr]]) -> Arc<Names> {
        let answers = answers.iter().rev().map(|one| one.to_vec()).collect();
        Arc::new(Names { answers: Mutex::new(answers), asked: AtomicUsize::new(0) })
    }

    fn resolver(self: &Arc<Self>) -> Resolver {
        let names = Arc::clone(self);
        let lookup = move |_: String| -> futures::future::BoxFuture<'static, std::io::Result<Vec<IpAddr>>> {
            names.asked.fetch_add(1, Ordering::SeqCst);
            let mut answers = names.answers.lock().unwrap();
            let answer = if answers.len() > 1 { answers.pop() } else { answers.last().cloned() };
            Box::pin(async move { Ok(answer.unwrap_or_default()) })
        };
        Resolver { lookup: Arc::new(lookup), public: |ip| ip == PUBLIC, ..Resolver::default() }
    }
}

fn web(names: &Arc<Names>) -> Web {
    Web::of(Settings { max_bytes: 1000, ..Settings::default() }, names.resolver())
}

/// A server at `ip`, and on the same port as `beside` if that is given.
async fn server(ip: IpAddr, beside: Option<u16>) -> MockServer {
    let listener = std::net::TcpListener::bind((ip, beside.unwrap_or(0))).unwrap();
    MockServer::builder().listener(listener).start().await
}

async fn says(server: &MockServer, text: &str) {
    Mock::given(method("GET"))
        .respond_with(ResponseTemplate::new(200).set_body_string(text))
        .mount(server)
        .await;
}

async fn redirects(server: &MockServer, from: &str, status: u16, to: &str) {
    let answer = ResponseTemplate::new(status).insert_header("location", to);
    Mock::given(path(from)).respond_with(answer).with_priority(1).mount(server).await;
}

async fn requests(server: &MockServer) -> usize {
    server.received_requests().await.unwrap().len()
}

#[tokio::test]
async fn a_name_that_turns_private_is_refused_and_is_looked_up_once_a_connection() {
    let public = server(PUBLIC, None).await;
    let port = public.address().port();
    let private = server(PRIVATE, Some(port)).await;
    says(&public, "public").await;
    says(&private, "the metadata of this machine").await;
    let names = Names::new(&[&[PUBLIC], &[PRIVATE]]);
    let web = web(&names);
    let url = format!("http://rebinding.test:{port}/");
    assert_eq!(web.get(&url).await.unwrap().text(), "public");
    // A check before the connection and a lookup by the connection would be two.
    assert_eq!(
        names.asked.load(Ordering::SeqCst),
        1,
        "the connection goes to the addresses that were checked"
    );
    let Err(WebError::Refused(text)) = web.get(&url).await else { panic!("it is not refused") };
    assert!(text.contains("rebinding.test is 127.0.0.1, which is not a public address"), "{text}");
    // One private address among public ones is enough.
    let mixed = Names::new(&[&[PUBLIC, PRIVATE]]);
    assert!(matches!(self::web(&mixed).get(&url).await, Err(WebError::Refused(_))));
    assert!(web.addresses("rebinding.test", 443).await.is_err());
    assert_eq!(requests(&private).await, 0);
    assert_eq!(requests(&public).await, 1);
}

#[tokio::test]
async fn no_redirect_leads_to_metadata_or_to_a_host_that_is_not_allowed() {
    let public = server(PUBLIC, None).await;
    let port = public.address().port();
    let private = server(PRIVATE, Some(port)).await;
    says(&private, "secret").await;
    let targets = [
        "http://169.254.169.254/latest/meta-data/".to_owned(),
        "http://[fd00:ec2::254]/latest/".to_owned(),
        "http://[::ffff:169.254.169.254]/".to_owned(),
        "http://2852039166/".to_owned(),
        "http://0xa9fea9fe/".to_owned(),
        format!("http://127.0.0.1:{port}/"),
        format!("//127.1:{port}/"),
        format!("http://0177.0.0.1:{port}/"),
        format!("http://user@127.0.0.2:{port}/"),
        format!("http://denied.test:{port}/"),
        "file:///etc/passwd".to_owned(),
        "gopher://127.0.0.1/".to_owned(),
    ];
    let rules = WebPolicy { allow: None, deny: vec!["denied.test".into()] };
    let web = web(&Names::new(&[&[PUBLIC]])).under(&rules, None);
    for (number, target) in targets.iter().enumerate() {
        for status in [301, 302, 303, 307, 308] {
            let from = format!("/{number}/{status}");
            redirects(&public, &from, status, target).await;
            let got = web.get(&format!("http://public.test:{port}{from}")).await;
            assert!(matches!(got, Err(WebError::Refused(_))), "{status} to {target}: {got:?}");
        }
    }
    assert_eq!(requests(&private).await, 0);
    // A name that the redirect leads to is resolved and checked like the first.
    redirects(&public, "/later", 302, &format!("http://rebinding.test:{port}/")).await;
    let later = self::web(&Names::new(&[&[PUBLIC], &[PRIVATE]]));
    let got = later.get(&format!("http://public.test:{port}/later")).await;
    assert!(matches!(got, Err(WebError::Refused(_))), "{got:?}");
    assert_eq!(requests(&private).await, 0);
}

#[tokio::test]
async fn a_redirect_to_a_public_host_is_followed_without_the_headers() {
    let public = server(PUBLIC, None).await;
    let port = public.address().port();
    let carried = Mock::given(header_exists("authorization")).and(path("/to"));
    carried.respond_with(ResponseTemplate::new(500)).with_priority(2).mount(&public).await;
    says(&public, "arrived").await;
    redirects(&public, "/from", 302, &format!("http://other.test:{port}/to")).await;
    redirects(&public, "/again", 302, "/again").await;
    let web = web(&Names::new(&[&[PUBLIC]]));
    let request = |path: &str, method: &str| WebRequest {
        method: method.to_owned(),
        url: format!("http://public.test:{port}{path}"),
        headers: vec![("Authorization".to_owned(), "Bearer secret".to_owned())],
        body: Vec::new(),
    };
    let got = web.send(request("/from", "")).await.unwrap();
    assert_eq!((got.text().as_str(), got.url), ("arrived", format!("http://other.test:{port}/to")));
    assert!(
        matches!(web.send(request("/again", "")).await, Err(WebError::Refused(text)) if text.contains("5 times"))
    );
    // A request with an effect is sent once, to the address that was meant.
    assert_eq!(web.send(request("/from", "POST")).await.unwrap().status, 302);
    for ours in ["Host", "Content-Length", "transfer-encoding", "connection", "a b"] {
        let headers = vec![(ours.to_owned(), "x".to_owned())];
        let got = web.send(WebRequest { headers, ..request("/", "") }).await;
        assert!(matches!(got, Err(WebError::Refused(_))), "{ours}: {got:?}");
    }
}

#[tokio::test]
async fn the_rules_of_agent_and_session_both_hold() {
    let public = server(PUBLIC, None).await;
    says(&public, "yes").await;
    let port = public.address().port();
    let base = web(&Names::new(&[&[PUBLIC]]));
    let of = |allow: Option<&[&str]>, deny: &[&str]| WebPolicy {
        allow: allow.map(|list| list.iter().map(|one| (*one).to_owned()).collect()),
        deny: deny.iter().map(|one| (*one).to_owned()).collect(),
    };
    let any = WebPolicy::default();
    for (agent, session, host, may) in [
        (any.clone(), None, "a.test", true),
        (of(Some(&["a.test"]), &[]), None, "a.test", true),
        (of(Some(&["a.test"]), &[]), None, "b.test", false),
        (of(Some(&["a.test"]), &[]), Some(any.clone()), "b.test", false),
        (of(Some(&["a.test"]), &[]), Some(of(Some(&["b.test"]), &[])), "b.test", false),
        (any.clone(), Some(of(Some(&["b.test"]), &[])), "a.test", false),
        (any.clone(), Some(of(None, &["*.b.test"])), "x.b.test", false),
        (of(None, &["127.0.0.2"]), None, "127.0.0.2", false),
        (any.clone(), None, "127.0.0.2", true),
        (any, Some(of(Some(&[]), &[])), "a.test", false),
    ] {
        let web = base.under(&agent, session.as_ref());
        let got = web.get(&format!("http://{host}:{port}/")).await;
        assert_eq!(got.is_ok(), may, "{agent:?} {session:?} {host}: {got:?}");
        assert_eq!(web.addresses(host, port).await.is_ok(), may);
    }
}

#[tokio::test]
async fn a_host_of_the_configuration_may_be_private_and_no_other() {
    let private = server(PRIVATE, None).await;
    says(&private, "the wiki").await;
    let port = private.address().port();
    let names = Names::new(&[&[PRIVATE]]);
    let named = WebPolicy { allow: Some(vec!["wiki.internal".into()]), deny: Vec::new() };
    let web = Web::of(Settings::default(), Resolver { named, ..names.resolver() });
    assert_eq!(web.get(&format!("http://wiki.internal:{port}/")).await.unwrap().text(), "the wiki");
    assert!(web.get(&format!("http://other.internal:{port}/")).await.is_err());
    assert!(web.get(&format!("http://127.0.0.1:{port}/")).await.is_err(), "only its name was listed");
    assert_eq!(requests(&private).await, 1);
    // A client of a configured URL reaches that host alone.
    let configured = format!("http://localhost:{port}/");
    let client = super::client(super::Reach::Named(&[&configured])).no_proxy().build().unwrap();
    assert_eq!(client.get(&configured).send().await.unwrap().text().await.unwrap(), "the wiki");
    let other = super::client(super::Reach::Named(&["http://example.org/"])).no_proxy().build().unwrap();
    assert!(other.get(&configured).send().await.is_err());
    let public = super::client(super::Reach::Public("; ask")).build().unwrap();
    let error = super::causes(&public.get(&configured).send().await.unwrap_err());
    assert!(error.contains("not a public address; ask"), "{error}");
}

/// Answers each connection with these bytes, and keeps it open if `open`.
async fn raw(answer: &'static [u8], open: bool) -> u16 {
    let listener = tokio::net::TcpListener::bind((PUBLIC, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 1024];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(answer).await;
            if open {
                held.push(stream);
            }
        }
    });
    port
}

#[tokio::test]
async fn a_large_a_packed_and_an_endless_answer_are_refused() {
    let short = Duration::from_millis(200);
    let settings = Settings { max_bytes: 1000, first_byte: short, total: short, ..Settings::default() };
    let web = Web::of(settings, Names::new(&[&[PUBLIC]]).resolver());
    let large: &[u8] =
        Box::leak(format!("HTTP/1.1 200 OK\r\n\r\n{}", "x".repeat(1001)).into_boxed_str().into_boxed_bytes());
    for (answer, open, why) in [
        (&b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n"[..], true, "more than 1000 bytes"),
        (large, false, "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f\x8b", false, "packed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nx", true, "did not finish its answer in time"),
        (b"HTTP/1.1 200 OK\r\n", true, "did not answer in time"),
        (b"", true, "did not answer in time"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nx", false, "broke off"),
    ] {
        let port = raw(answer, open).await;
        let got = web.get(&format!("http://public.test:{port}/")).await;
        let Err(WebError::Unknown(text)) = got.clone() else { panic!("{why}: {got:?}") };
        assert!(
            crate::tool::ToolError::from(got.unwrap_err()).kind == crate::tool::ToolErrorKind::OutcomeUnknown,
            "{why}: nobody knows what a tool's call did"
        );
        assert!(text.contains(why), "{why}: {text}");
    }
}

#[tokio::test]
async fn a_file_is_saved_refused_or_its_host_is_away() {
    let short = Duration::from_millis(200);
    let settings = || Settings { first_byte: short, ..Settings::default() };
    let save = async |names: &Arc<Names>, port: u16| {
        let file = tempfile::tempfile().unwrap();
        let web = Web::of(settings(), names.resolver());
        web.save(&format!("http://public.test:{port}/"), &file, 10, short).await
    };
    let public = Names::new(&[&[PUBLIC]]);
    for (answer, open, expected) in [
        (&b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"[..], false, None),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", false, Some((true, "status 500"))),
        (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", false, Some((true, "status 503"))),
        (b"HTTP/1.1 429 No\r\ncontent-length: 0\r\n\r\n", false, Some((true, "status 429"))),
        (b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", false, Some((false, "status 404"))),
        (b"HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n", false, Some((false, "status 403"))),
        (b"HTTP/1.1 200 OK\r\n\r\nmore than ten", false, Some((false, "more than 10 bytes"))),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", false, Some((true, "broke off"))),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nx", true, Some((true, "did not finish"))),
        (b"", true, Some((true, "did not answer in time"))),
        (b"", false, Some((true, "did not answer"))),
    ] {
        let got = save(&public, raw(answer, open).await).await;
        let is = match (&got, expected) {
            (Ok(()), None) => true,
            (Err(Unsaved::Away(why)), Some((true, text))) => why.contains(text),
            (Err(Unsaved::Refused(why)), Some((false, text))) => why.contains(text),
            (_, _) => false,
        };
        assert!(is, "{expected:?}: {got:?}");
    }
    // A host that cannot be reached is away; one that may not be contacted is refused.
    let port = server(PUBLIC, None).await.address().port();
    let got = save(&public, port).await;
    assert!(matches!(&got, Err(Unsaved::Away(_))), "it does not listen any more: {got:?}");
    let got = save(&Names::new(&[&[]]), port).await;
    assert!(matches!(&got, Err(Unsaved::Away(why)) if why.contains("has no address")), "{got:?}");
    let got = save(&Names::new(&[&[PRIVATE]]), port).await;
    assert!(matches!(&got, Err(Unsaved::Refused(why)) if why.contains("not a public address")), "{got:?}");
}
