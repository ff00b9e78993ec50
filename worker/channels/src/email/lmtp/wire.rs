//! Reads lines and mails from the connection.

use bytes::Bytes;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};
use wakeful_workflow::mail::scan::MAIL_BYTES;

/// The longest line of a mail. RFC 5321 allows 1,000 bytes, but real mail has longer lines.
const TEXT_LINE_BYTES: usize = 1 << 20;

/// A line, or the reason why there is none.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// The line without its line break.
    Whole(Vec<u8>),
    /// The line ends with a line feed alone, which another server could read as two lines.
    BareLf,
    TooLong,
    End,
}

/// Reads up to the next line feed, also when the line is longer than `limit`.
pub(super) async fn line(from: &mut (impl AsyncBufRead + Unpin), limit: usize) -> std::io::Result<Line> {
    let mut line = Vec::new();
    let mut too_long = false;
    loop {
        let buffer = from.fill_buf().await?;
        if buffer.is_empty() {
            return Ok(Line::End);
        }
        let newline = buffer.iter().position(|byte| *byte == b'\n');
        let taken = newline.map_or(buffer.len(), |at| at + 1);
        if line.len() + taken > limit {
            too_long = true;
        } else {
            line.extend_from_slice(&buffer[..taken]);
        }
        from.consume(taken);
        if newline.is_some() {
            break;
        }
    }
    if too_long {
        return Ok(Line::TooLong);
    }
    line.pop();
    if line.pop() != Some(b'\r') {
        return Ok(Line::BareLf);
    }
    Ok(Line::Whole(line))
}

/// The outcome of reading a mail after DATA.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Data {
    Mail(Bytes),
    /// Read to its end and refused.
    TooLarge,
    /// A line break is not CRLF. Servers disagree about where such a line ends, so a mail could smuggle in
    /// commands.
    Smuggled,
    /// The connection ended inside the mail.
    Cut,
}

/// Reads a mail up to the line with a single dot. Removes the extra dot that the sender adds to each line
/// that begins with a dot.
pub(super) async fn data(from: &mut (impl AsyncBufRead + Unpin)) -> std::io::Result<Data> {
    let (mut mail, mut too_large, mut smuggled) = (Vec::new(), false, false);
    loop {
        let text = match line(from, TEXT_LINE_BYTES).await? {
            Line::Whole(text) => text,
            // A bare line feed makes the lines ambiguous. Read on to the real end, then refuse the mail.
            Line::BareLf => {
                smuggled = true;
                continue;
            }
            Line::TooLong => {
                too_large = true;
                continue;
            }
            Line::End => return Ok(Data::Cut),
        };
        if text == b"." {
            break;
        }
        smuggled |= text.contains(&b'\r');
        let text = text.strip_prefix(b".").unwrap_or(&text);
        if mail.len() + text.len() + 2 > MAIL_BYTES {
            too_large = true;
            mail = Vec::new();
        }
        if !too_large && !smuggled {
            mail.extend_from_slice(text);
            mail.extend_from_slice(b"\r\n");
        }
    }
    Ok(match (smuggled, too_large) {
        (true, _) => Data::Smuggled,
        (false, true) => Data::TooLarge,
        (false, false) => Data::Mail(mail.into()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(mut wire: &[u8]) -> Data {
        data(&mut wire).await.unwrap()
    }

    #[tokio::test]
    async fn a_mail_ends_with_a_dot_and_gives_its_doubled_dots_back() {
        let mail = |text: &'static str| Data::Mail(Bytes::from_static(text.as_bytes()));
        assert_eq!(read(b"a\r\n..b\r\n...\r\n.\r\nQUIT\r\n").await, mail("a\r\n.b\r\n..\r\n"));
        assert_eq!(read(b".\r\n").await, mail(""));
        assert_eq!(read(b"a\r\n").await, Data::Cut);
        assert_eq!(read(b"a\r\n.").await, Data::Cut);
    }

    #[tokio::test]
    async fn a_line_that_two_servers_end_differently_is_refused_at_the_true_end() {
        for hostile in [
            &b"a\n.\r\nMAIL FROM:<x>\r\n.\r\n"[..],
            b"a\r\n.\nMAIL FROM:<x>\r\n.\r\n",
            b"a\n.\nMAIL FROM:<x>\r\n.\r\n",
            b"a\r.\r\nb\r\n.\r\n",
            b"a\r\n.\rMAIL\r\n.\r\n",
        ] {
            let mut wire = hostile;
            assert_eq!(
                data(&mut wire).await.unwrap(),
                Data::Smuggled,
                "{:?}",
                String::from_utf8_lossy(hostile)
            );
        }
    }

    #[tokio::test]
    async fn what_is_too_large_is_read_to_its_end() {
        let mut wire = "a".repeat(TEXT_LINE_BYTES) + "\r\n.\r\nQUIT\r\n";
        assert_eq!(read(wire.as_bytes()).await, Data::TooLarge);
        let many = "a".repeat(1000) + "\r\n";
        wire = many.repeat(MAIL_BYTES / 1002 + 1) + ".\r\nQUIT\r\n";
        let mut wire = wire.as_bytes();
        assert_eq!(data(&mut wire).await.unwrap(), Data::TooLarge);
        assert_eq!(wire, b"QUIT\r\n");
    }

    #[tokio::test]
    async fn a_line_has_its_limit_and_its_end() {
        let mut wire = &b"NOOP\r\nQUIT\nlonger than that\r\nEHLO"[..];
        assert_eq!(line(&mut wire, 10).await.unwrap(), Line::Whole(b"NOOP".to_vec()));
        assert_eq!(line(&mut wire, 10).await.unwrap(), Line::BareLf);
        assert_eq!(line(&mut wire, 10).await.unwrap(), Line::TooLong);
        assert_eq!(line(&mut wire, 10).await.unwrap(), Line::End);
    }
}
