use super::*;
use crate::front::{Limits, serve};
use axum::BoxError;
use axum::Router;
use axum::response::IntoResponse;
use axum::routing::{any, get};
use futures::{StreamExt, stream};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;
use tokio::sync::{mpsc, oneshot};

const KEPT: &str = "GET /quick HTTP/1.1\r\nHost: localhost\r\n\r\n";
const STREAM: &str = "GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n";

const QUICK_PATH: &str = "/quick";
const STREAM_PATH: &str = "/stream";

/// The system keeps no more than this of what a connection sends or receives.
const SYSTEM_BYTES: u32 = 4 << 10;

/// A server whose `/stream` shows a body. Each request takes the next of the bodies.
struct Server {
    address: SocketAddr,
    stop: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<io::Result<()>>,
}

fn server(connections: usize, bodies: Vec<Body>) -> Server {
    with_header(connections, "", bodies)
}

fn with_header(connections: usize, more: &str, bodies: Vec<Body>) -> Server {
    let bodies = Arc::new(Mutex::new(bodies.into_iter()));
    let more = more.to_owned();
    let events = any(move || async move {
        let body = bodies.lock().unwrap().next().unwrap();
        ([("content-type", "text/event-stream"), ("x-more", &*more)], body).into_response()
    });
    let router = Router::new().route(QUICK_PATH, get(|| async { "quick" })).route(STREAM_PATH, events);
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_send_buffer_size(SYSTEM_BYTES).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(64).unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = oneshot::channel();
    let limits = Limits { connections, head: Duration::from_secs(3600), unread: Duration::from_secs(30) };
    let ended = tokio::spawn(serve(listener, router, limits, async { drop(stopped.await) }));
    Server { address, stop, ended }
}

fn body<S>(frames: S) -> Body
where
    S: futures::Stream<Item = &'static str> + Send + 'static,
{
    Body::from_stream(frames.map(Ok::<_, BoxError>))
}

/// A body whose frames are sent while it is read.
fn live() -> (mpsc::UnboundedSender<&'static str>, Body) {
    let (sender, mut receiver) = mpsc::unbounded_channel();
    (sender, body(stream::poll_fn(move |context| receiver.poll_recv(context))))
}

async fn send(address: SocketAddr, text: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(SYSTEM_BYTES).unwrap();
    let mut connection = socket.connect(address).await.unwrap();
    connection.write_all(text.as_bytes()).await.unwrap();
    connection
}

async fn until(connection: &mut TcpStream, end: &str) -> String {
    let mut text = String::new();
    while !text.ends_with(end) {
        // The connection may have no byte to spare for what comes after it.
        text.push(char::from(
            connection.read_u8().await.unwrap_or_else(|_| panic!("no {end:?} in {text:?}")),
        ));
    }
    text
}

/// Everything until the server closes.
async fn rest(connection: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset ends it too.
    let _ = connection.read_to_end(&mut bytes).await;
    String::from_utf8(bytes).unwrap()
}

#[tokio::test]
async fn frames_that_are_ready_follow_the_head_and_the_end_is_told() {
    let frames = ["data: one\n\n", "", "data: two, of twenty-six\n\n"];
    let server = server(10, vec![body(stream::iter(frames))]);
    let mut connection = send(server.address, STREAM).await;
    let head = until(&mut connection, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    for line in [
        "content-type: text/event-stream",
        "transfer-encoding: chunked",
        "connection: close",
        "x-content-type-options: nosniff",
    ] {
        assert_eq!(head.lines().filter(|is| *is == line).count(), 1, "{head}");
    }
    let told = "b\r\ndata: one\n\n\r\n1a\r\ndata: two, of twenty-six\n\n\r\n0\r\n\r\n";
    assert_eq!(rest(&mut connection).await, told);
}

#[tokio::test]
async fn a_head_longer_than_the_systems_buffers_arrives_whole_and_once() {
    let more: String = (0..6000).map(|n| format!("{n:04x}.")).collect();
    let frames = stream::iter(["data: one\n\n", "data: two\n\n"]);
    let server = with_header(10, &more, vec![body(frames)]);
    let mut connection = send(server.address, STREAM).await;
    let head = until(&mut connection, "\r\n\r\n").await;
    assert_eq!(head.matches("HTTP/1.1 200").count(), 1);
    assert!(head.contains(&format!("x-more: {more}\r\n")), "{head}");
    let told = "b\r\ndata: one\n\n\r\nb\r\ndata: two\n\n\r\n0\r\n\r\n";
    assert_eq!(until(&mut connection, "\r\n0\r\n\r\n").await, told);
    assert_eq!(rest(&mut connection).await, "");
}

#[tokio::test]
async fn a_slow_reader_stops_the_stream_and_loses_nothing() {
    const FRAME: &str = "data: 0123456789012345678901234567890123456789012345678\n\n";
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let frames = stream::repeat_with(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        FRAME
    });
    let server = server(10, vec![body(frames)]);
    let mut connection = send(server.address, STREAM).await;
    until(&mut connection, "\r\n\r\n").await;
    let chunk = format!("{:x}\r\n{FRAME}\r\n", FRAME.len());
    let mut seen = vec![0; chunk.len()];
    for read in 1..5000 {
        connection.read_exact(&mut seen).await.unwrap();
        assert_eq!(seen, chunk.as_bytes());
        // The system doubles what it was asked for, on both sides.
        let ahead = (taken.load(Ordering::Relaxed) - read) * chunk.len();
        assert!(ahead < 16 * SYSTEM_BYTES as usize, "{ahead} bytes are ahead of the reader");
    }
}

#[tokio::test]
async fn a_client_that_goes_ends_its_stream_and_one_that_says_too_much_too() {
    let bodies: Vec<_> = (0..3).map(|_| live()).collect();
    let (senders, bodies): (Vec<_>, Vec<_>) = bodies.into_iter().unzip();
    let server = server(10, bodies);
    for (at, sender) in senders.iter().enumerate() {
        let mut connection = send(server.address, STREAM).await;
        until(&mut connection, "\r\n\r\n").await;
        sender.send("data: one\n\n").unwrap();
        until(&mut connection, "data: one\n\n\r\n").await;
        assert!(!sender.is_closed());
        match at {
            0 => drop(connection),
            1 => connection.shutdown().await.unwrap(),
            // The server may close it while it is written.
            _ => drop(connection.write_all(&[b'x'; IGNORED_BYTES + 1]).await),
        }
        sender.closed().await;
    }
}

#[tokio::test]
async fn what_a_client_sends_after_its_request_is_no_request() {
    let (sender, body) = live();
    let server = server(10, vec![body]);
    let mut connection = send(server.address, &format!("{STREAM}{KEPT}")).await;
    until(&mut connection, "\r\n\r\n").await;
    connection.write_all(KEPT.as_bytes()).await.unwrap();
    sender.send("data: one\n\n").unwrap();
    until(&mut connection, "data: one\n\n\r\n").await;
    drop(sender);
    assert_eq!(rest(&mut connection).await, "0\r\n\r\n");
}

#[tokio::test]
async fn a_kept_connection_may_open_a_stream() {
    let (sender, body) = live();
    let server = server(10, vec![body]);
    let mut connection = send(server.address, KEPT).await;
    assert!(until(&mut connection, "quick").await.starts_with("HTTP/1.1 200"));
    // Two at once: the head of the second comes after the whole first answer.
    connection.write_all(format!("{KEPT}{STREAM}").as_bytes()).await.unwrap();
    assert!(until(&mut connection, "quick").await.starts_with("HTTP/1.1 200"));
    let head = until(&mut connection, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
    sender.send("data: one\n\n").unwrap();
    drop(sender);
    assert_eq!(rest(&mut connection).await, "b\r\ndata: one\n\n\r\n0\r\n\r\n");
}

#[tokio::test]
async fn http_1_0_gets_no_chunks_and_head_gets_no_body() {
    let (sender, idle) = live();
    let server = server(10, vec![body(stream::iter(["data: one\n\n", "data: two\n\n"])), idle]);
    let mut old = send(server.address, "GET /stream HTTP/1.0\r\n\r\n").await;
    let head = until(&mut old, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.0 200") && !head.contains("transfer-encoding"), "{head}");
    assert_eq!(rest(&mut old).await, "data: one\n\ndata: two\n\n");
    let asks = "HEAD /stream HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut connection = send(server.address, &format!("{asks}{KEPT}")).await;
    let head = until(&mut connection, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200") && head.contains("text/event-stream"), "{head}");
    assert!(until(&mut connection, "quick").await.starts_with("HTTP/1.1 200"), "it is kept");
    assert!(sender.is_closed());
}

#[tokio::test]
async fn an_answer_of_a_known_length_or_to_a_body_stays_with_hyper() {
    let (sender, live) = live();
    let server = server(10, vec![Body::from("data: one\n\n"), live]);
    let mut connection = send(server.address, STREAM).await;
    let head = until(&mut connection, "data: one\n\n").await;
    assert!(head.contains("content-length: 11\r\n") && !head.contains("connection"), "{head}");
    let posts = "POST /stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}";
    connection.write_all(posts.as_bytes()).await.unwrap();
    let head = until(&mut connection, "\r\n\r\n").await;
    assert!(head.contains("transfer-encoding: chunked") && !head.contains("connection"), "{head}");
    sender.send("data: one\n\n").unwrap();
    let chunk = until(&mut connection, "one\n\n\r\n").await;
    assert_eq!(chunk.to_lowercase(), "b\r\ndata: one\n\n\r\n");
}

#[tokio::test]
async fn a_silent_stream_keeps_little() {
    let server = server(10, Vec::new());
    let mut connection = send(server.address, "").await;
    let mut stream = Stream { body: Body::empty(), framing: Framing::Chunks };
    let bytes = size_of_val(&stream.send(&mut connection));
    assert!(bytes <= 512, "{bytes} bytes besides its body");
}

#[tokio::test]
async fn a_body_that_fails_gets_no_end() {
    let frames = [Ok("data: one\n\n"), Err(BoxError::from("it broke"))];
    let server = server(10, vec![Body::from_stream(stream::iter(frames))]);
    let mut connection = send(server.address, STREAM).await;
    until(&mut connection, "\r\n\r\n").await;
    assert_eq!(rest(&mut connection).await, "b\r\ndata: one\n\n\r\n");
}

#[tokio::test]
async fn a_stream_keeps_its_place_until_it_ends() {
    let (sender, body) = live();
    let server = server(1, vec![body]);
    let mut connection = send(server.address, STREAM).await;
    until(&mut connection, "\r\n\r\n").await;
    assert!(rest(&mut send(server.address, KEPT).await).await.starts_with("HTTP/1.1 503"));
    drop(sender);
    assert_eq!(rest(&mut connection).await, "0\r\n\r\n");
    // The place is free a moment after the client has seen the end.
    while !until(&mut send(server.address, KEPT).await, "\r\n\r\n").await.starts_with("HTTP/1.1 200") {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn the_process_waits_for_the_end_of_a_stream() {
    let (sender, body) = live();
    let server = server(10, vec![body]);
    let mut connection = send(server.address, STREAM).await;
    until(&mut connection, "\r\n\r\n").await;
    server.stop.send(()).unwrap();
    while TcpStream::connect(server.address).await.is_ok() {
        tokio::task::yield_now().await;
    }
    sender.send("data: one\n\n").unwrap();
    assert_eq!(until(&mut connection, "one\n\n\r\n").await, "b\r\ndata: one\n\n\r\n");
    assert!(!server.ended.is_finished());
    drop(sender);
    assert_eq!(rest(&mut connection).await, "0\r\n\r\n");
    server.ended.await.unwrap().unwrap();
}
