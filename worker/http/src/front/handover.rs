//! Live streams leave hyper. It keeps two buffers of 8 KB for as long as a connection lives, and has no setting for less;
//! most streams have nothing to show most of the time. So hyper writes the head of a stream, gives its connection back,
//! and [`Stream::send`] writes the body.
//!
//! - A stream is an answer of server-sent events without a known length ([`Handover::answer`]), to a request without a
//!   body: hyper has nothing left to read then.
//! - The head goes first, and whole. hyper gets a body that has no frame, so its buffer holds the head and nothing
//!   else. It flushes a connection only when that buffer is empty, and [`Watched`] sees that.
//! - The body is framed as the head says: in chunks, or up to the end of the connection for HTTP/1.0.
//! - A frame is taken when the one before is with the system, so a slow reader stops its stream and fills no memory.
//! - The connection ends with the answer, and the head says so. What the client sends meanwhile is no request. It is
//!   dropped, up to [`IGNORED_BYTES`].
//! - A client that closes its side has gone, as it has for hyper.

use super::HEAD_BYTES;
use axum::body::{Body, Bytes};
use axum::http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, TRANSFER_ENCODING};
use axum::http::{Method, Request, Response, StatusCode, Version};
use http_body::{Body as HttpBody, Frame};
use hyper::body::Buf;
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::mem;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};

/// The most that a client may send while it reads a stream.
const IGNORED_BYTES: usize = HEAD_BYTES;

/// Where a connection's stream is.
#[derive(Clone, Default)]
pub(super) struct Handover(Arc<Mutex<Slot>>);

#[derive(Default)]
enum Slot {
    #[default]
    Empty,
    /// The head is in hyper's buffer.
    HeadWritten(Stream),
    /// The system has the whole head.
    HeadSent(Stream),
}

/// How the end of a body is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Chunks,
    Close,
}

/// The body of an answer whose head is sent.
pub(super) struct Stream {
    body: Body,
    framing: Framing,
}

impl Framing {
    /// The framing of a stream that answers `request`; `None` if there can be none.
    pub fn of<B: HttpBody>(request: &Request<B>) -> Option<Framing> {
        if !request.body().is_end_stream() || matches!(*request.method(), Method::HEAD | Method::CONNECT) {
            return None;
        }
        match request.version() {
            Version::HTTP_11 => Some(Framing::Chunks),
            Version::HTTP_10 => Some(Framing::Close),
            _ => None,
        }
    }

    async fn write(self, mut data: Bytes, writer: &mut WriteHalf<'_>) -> io::Result<()> {
        match self {
            Framing::Chunks => {
                let size = format!("{:x}\r\n", data.len());
                writer.write_all_buf(&mut size.as_bytes().chain(data).chain(&b"\r\n"[..])).await
            }
            Framing::Close => writer.write_all_buf(&mut data).await,
        }
    }
}

impl Handover {
    /// The connection for hyper.
    pub fn watched(&self, connection: TcpStream) -> Watched {
        Watched { connection, handover: self.clone() }
    }

    /// The answer for hyper. A stream's body stays here.
    pub fn answer(&self, framing: Framing, mut response: Response<Body>) -> Response<Body> {
        if !is_stream(&response) {
            return response;
        }
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        response.map(|body| {
            let stream = Some(Stream { body, framing });
            Body::new(NoFrame { stream, handover: self.clone() })
        })
    }

    /// The stream whose head is sent.
    pub fn take(&self) -> Option<Stream> {
        let mut slot = self.slot();
        match mem::take(&mut *slot) {
            Slot::HeadSent(stream) => Some(stream),
            before @ (Slot::Empty | Slot::HeadWritten(_)) => {
                *slot = before;
                None
            }
        }
    }

    fn flushed(&self) {
        let mut slot = self.slot();
        *slot = match mem::take(&mut *slot) {
            Slot::HeadWritten(stream) => Slot::HeadSent(stream),
            before @ (Slot::Empty | Slot::HeadSent(_)) => before,
        };
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_stream(response: &Response<Body>) -> bool {
    let headers = response.headers();
    let kind = headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    response.status() == StatusCode::OK
        && kind.starts_with(b"text/event-stream")
        && response.body().size_hint().exact().is_none()
        && !headers.contains_key(CONTENT_LENGTH)
        && !headers.contains_key(TRANSFER_ENCODING)
}

/// The body that hyper gets. hyper asks for the first frame when it has written the head.
struct NoFrame {
    stream: Option<Stream>,
    handover: Handover,
}

impl HttpBody for NoFrame {
    type Data = Bytes;
    type Error = axum::Error;

    /// Registers no waker: once the head is sent, hyper does not poll this any more.
    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        if let Some(stream) = self.stream.take() {
            *self.handover.slot() = Slot::HeadWritten(stream);
        }
        Poll::Pending
    }
}

/// A connection that tells its [`Handover`] when hyper has nothing left to write.
pub(super) struct Watched {
    connection: TcpStream,
    handover: Handover,
}

impl Watched {
    pub fn into_inner(self) -> TcpStream {
        self.connection
    }
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(context, buffer)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.connection).poll_flush(context))?;
        self.handover.flushed();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(context)
    }
}

impl Stream {
    /// Writes the body, until it ends or the client has gone. Then the connection is to be closed.
    ///
    /// # Errors
    /// When the body fails, or the connection. The client gets no end of the body then.
    pub async fn send(&mut self, connection: &mut TcpStream) -> io::Result<()> {
        // A frame does not wait until the client has acknowledged the one before.
        connection.set_nodelay(true)?;
        let (reader, mut writer) = connection.split();
        tokio::select! {
            gone = until_gone(&reader) => gone,
            sent = self.write(&mut writer) => sent,
        }
    }

    async fn write(&mut self, writer: &mut WriteHalf<'_>) -> io::Result<()> {
        while let Some(frame) = poll_fn(|context| Pin::new(&mut self.body).poll_frame(context)).await {
            // Streams have no trailers.
            let Ok(data) = frame.map_err(io::Error::other)?.into_data() else { continue };
            // A chunk of no bytes would end the body. Boxed, so that a silent stream keeps nothing of it.
            if !data.is_empty() {
                Box::pin(self.framing.write(data, writer)).await?;
            }
        }
        // From here the connection may lose its place to another.
        self.body = Body::empty();
        if self.framing == Framing::Chunks {
            writer.write_all(b"0\r\n\r\n").await?;
        }
        writer.shutdown().await
    }
}

/// Waits until the client has gone, or has sent more than it may.
async fn until_gone(reader: &ReadHalf<'_>) -> io::Result<()> {
    let mut ignored = 0;
    while ignored <= IGNORED_BYTES {
        reader.readable().await?;
        match reader.try_read(&mut [0; 1024]) {
            Ok(0) => return Ok(()),
            Ok(bytes) => ignored += bytes,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("the client of a stream sent too much"))
}

#[cfg(test)]
mod tests;
