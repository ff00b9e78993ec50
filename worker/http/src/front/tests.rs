use super::*;
use axum::routing::get;
use futures::StreamExt as _;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

const QUICK: &str = "/quick";
const HELD: &str = "/held";
/// Answers with more than the kernel's buffers hold, in pieces.
const LARGE: &str = "/large";

/// A server with these limits. [`HELD`] answers when `release` is sent.
struct Server {
    address: SocketAddr,
    release: tokio::sync::watch::Sender<bool>,
    stop: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<io::Result<()>>,
    /// Tells of each answer of [`LARGE`] that is let go of, sent or not.
    let_go: mpsc::UnboundedReceiver<()>,
}

/// Tells of its end.
struct Told(mpsc::UnboundedSender<()>);

impl Drop for Told {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

async fn server(connections: usize, head: Duration) -> Server {
    let (release, released) = tokio::sync::watch::channel(false);
    let held = move || {
        let mut released = released.clone();
        async move {
            let _ = released.wait_for(|is| *is).await;
            "held"
        }
    };
    let (lets_go, let_go) = mpsc::unbounded_channel();
    let router = Router::new()
        .route("/healthz", get(|| async { "well" }))
        .route(QUICK, get(|| async { "quick" }))
        .route(HELD, get(held))
        .route(LARGE, get(move || std::future::ready(large(Told(lets_go.clone())))));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let limits = Limits { connections, head, unread: Duration::from_secs(5) };
    let ended = tokio::spawn(serve(listener, router, limits, async { drop(stopped.await) }));
    Server { address, release, stop, ended, let_go }
}

fn large(told: Told) -> Body {
    let piece = move || {
        let _ = &told;
        Ok::<_, Infallible>(vec![b'x'; 1 << 20])
    };
    Body::from_stream(futures::stream::repeat_with(piece).take(64))
}

const LONG: Duration = Duration::from_secs(3600);

async fn send(address: SocketAddr, text: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(text.as_bytes()).await.unwrap();
    stream
}

async fn ask(address: SocketAddr, path: &str) -> TcpStream {
    send(address, &format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")).await
}

/// Everything until the server closes.
async fn rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset ends it too.
    let _ = stream.read_to_end(&mut bytes).await;
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn a_head_that_does_not_come_whole_and_a_silent_connection_are_closed() {
    let server = server(100, Duration::from_millis(200)).await;
    for text in ["", "GET /quick HTT", "GET /quick HTTP/1.1\r\nHost: localhost\r\n"] {
        let answer = rest(send(server.address, text).await).await;
        assert!(!answer.contains("quick"), "{answer}");
    }
    let kept = send(server.address, "GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(rest(kept).await.ends_with("quick"), "answered, and closed after a while");
    // What is being answered may take its time.
    let held = ask(server.address, HELD).await;
    rest(send(server.address, "").await).await;
    server.release.send(true).unwrap();
    assert!(rest(held).await.ends_with("held"));
}

#[tokio::test]
async fn an_answer_before_the_end_of_the_body_says_that_the_connection_ends() {
    let server = server(100, LONG).await;
    // No POST is taken here, so nobody reads these bodies.
    let post = |length: usize, more: &str, body: &str| {
        format!("POST {QUICK} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n{body}")
    };
    for text in [post(10, "", "x"), post(10, "Expect: 100-continue\r\n", "")] {
        let answer = rest(send(server.address, &text).await).await;
        assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
    // A short one that is there is read, and the next request is answered.
    let next = format!("GET {QUICK} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    let both = rest(send(server.address, &(post(3, "", "abc") + &next)).await).await;
    let (first, second) = both.split_once("HTTP/1.1 200").expect("both are answered");
    assert!(first.starts_with("HTTP/1.1 405") && !first.contains("connection: close"), "{first}");
    assert!(second.ends_with("quick"), "{second}");
}

#[tokio::test]
async fn who_does_not_read_a_large_answer_loses_the_connection() {
    let mut server = server(1, LONG).await;
    let mut unread = ask(server.address, LARGE).await;
    let mut head = [0; 12];
    unread.read_exact(&mut head).await.unwrap();
    assert_eq!(&head, b"HTTP/1.1 200");
    let full = rest(ask(server.address, QUICK).await).await;
    assert!(full.starts_with("HTTP/1.1 503"), "{full}");
    let let_go = tokio::time::timeout(LONG_ENOUGH, server.let_go.recv()).await;
    assert_eq!(let_go, Ok(Some(())), "the place is held by one who does not read");
    assert!(rest(ask(server.address, QUICK).await).await.ends_with("quick"));
    // One who reads gets all of it.
    let read = rest(ask(server.address, LARGE).await).await;
    assert!(read.len() > 64 << 20, "{}", read.len());
}

/// Far beyond what the kernel needs to give up a connection.
const LONG_ENOUGH: Duration = Duration::from_secs(20);

#[tokio::test]
async fn when_all_places_are_taken_the_one_that_waits_longest_gives_way() {
    let server = server(3, LONG).await;
    let held = ask(server.address, HELD).await;
    let oldest = send(server.address, "GET /quick HTTP/1.1\r\n").await;
    // Its answer shows that all three have their places.
    let mut kept = send(server.address, "GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    let mut answer = [0; 15];
    kept.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    assert!(rest(ask(server.address, QUICK).await).await.ends_with("quick"));
    assert_eq!(rest(oldest).await, "");
    server.release.send(true).unwrap();
    assert!(rest(held).await.ends_with("held"), "what is being answered keeps its place");
}

#[tokio::test]
async fn when_all_are_being_answered_a_new_one_gets_503_and_the_health_is_told() {
    let server = server(2, LONG).await;
    let held = [ask(server.address, HELD).await, ask(server.address, HELD).await];
    let refused = loop {
        // The requests may not have come in yet; then one of them gives way, and the next is refused.
        let answer = rest(ask(server.address, QUICK).await).await;
        if answer.starts_with("HTTP/1.1 503") {
            break answer;
        }
        drop(ask(server.address, HELD).await);
        tokio::task::yield_now().await;
    };
    assert!(refused.contains("retry-after: 1") && refused.contains("connection: close"), "{refused}");
    assert!(rest(ask(server.address, "/healthz").await).await.ends_with("well"));
    server.release.send(true).unwrap();
    drop(held);
}

#[tokio::test]
async fn at_the_end_what_is_in_hand_is_answered_and_nothing_new_is_accepted() {
    let server = server(10, LONG).await;
    let (held, idle) = (ask(server.address, HELD).await, send(server.address, "").await);
    // Its answer shows that the others were accepted.
    rest(ask(server.address, QUICK).await).await;
    server.stop.send(()).unwrap();
    assert_eq!(rest(idle).await, "");
    server.release.send(true).unwrap();
    assert!(rest(held).await.ends_with("held"));
    server.ended.await.unwrap().unwrap();
    assert!(TcpStream::connect(server.address).await.is_err());
}

#[test]
fn the_address_with_the_most_connections_gives_way_and_a_lone_caller_does_not() {
    let places = Arc::new(Places::new(4, 1));
    let take = |address: &str| match Places::take(&places, address.parse().unwrap()) {
        Given::Place(place) => place,
        Given::Reserve(_) | Given::Nothing => panic!("there is room"),
    };
    let is_out = |place: &Place| {
        let pushed_out = std::pin::pin!(place.pushed_out());
        futures::FutureExt::now_or_never(pushed_out).is_some()
    };
    use places::Doing;
    let lone = take("10.0.0.1");
    let many = [take("10.0.0.2"), take("10.0.0.2"), take("10.0.0.2")];
    many[0].now(Doing::Served);
    many[1].now(Doing::Receiving);
    let next = take("10.0.0.3");
    assert!(is_out(&many[2]), "it waits, and its address has the most");
    let another = take("10.0.0.3");
    assert!(is_out(&many[1]) && !is_out(&lone), "a body that comes gives way too");
    for place in [&lone, &next, &another] {
        place.now(Doing::Served);
    }
    let Given::Reserve(reserve) = Places::take(&places, "10.0.0.1".parse().unwrap()) else {
        panic!("all are being answered")
    };
    assert!(matches!(Places::take(&places, "10.0.0.1".parse().unwrap()), Given::Nothing));
    drop((reserve, next));
    assert!(matches!(Places::take(&places, "10.0.0.1".parse().unwrap()), Given::Place(_)));
}
