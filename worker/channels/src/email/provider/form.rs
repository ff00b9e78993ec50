//! Reads the fields of a form from a complete body: urlencoded or multipart.

use axum::http::{HeaderMap, header};
use bytes::Bytes;
use futures::stream;
use std::convert::Infallible;

/// A form with more fields is refused.
const FIELDS: usize = 1_100;

/// The multipart body is parsed in pieces of this size.
const CHUNK: usize = 64 << 10;

/// One field. The value is bytes, because mail is not always UTF-8.
#[derive(Clone, Debug)]
pub struct Field {
    pub name: String,
    /// `None` if the field is not a file.
    pub file_name: Option<String>,
    pub media_type: Option<String>,
    pub bytes: Vec<u8>,
}

/// The encoding of the body.
#[derive(Clone, Debug)]
pub enum Encoding {
    Urlencoded,
    Multipart { boundary: String },
    Json,
}

impl Encoding {
    /// Returns the encoding that the content type names. `None` if the body is neither a form nor JSON.
    pub fn of(headers: &HeaderMap) -> Option<Encoding> {
        let media_type = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
        let kind = media_type.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        match kind.as_str() {
            "application/x-www-form-urlencoded" => Some(Encoding::Urlencoded),
            "application/json" => Some(Encoding::Json),
            "multipart/form-data" => {
                multer::parse_boundary(media_type).ok().map(|boundary| Encoding::Multipart { boundary })
            }
            _ => None,
        }
    }
}

/// Reads the fields that `wanted` selects, each of at most `limit` bytes. Skips the others.
///
/// # Errors
/// A sentence that says what is wrong with the form.
pub async fn fields(
    encoding: &Encoding,
    body: &Bytes,
    limit: usize,
    wanted: impl Fn(&str) -> bool,
) -> Result<Vec<Field>, String> {
    match encoding {
        Encoding::Urlencoded => urlencoded(body, limit, wanted),
        Encoding::Multipart { boundary } => multipart(boundary, body, limit, wanted).await,
        Encoding::Json => Ok(Vec::new()),
    }
}

fn urlencoded(body: &[u8], limit: usize, wanted: impl Fn(&str) -> bool) -> Result<Vec<Field>, String> {
    let mut fields = Vec::new();
    for (number, pair) in body.split(|b| *b == b'&').enumerate() {
        if number >= FIELDS {
            return Err(format!("the form has more than {FIELDS} fields"));
        }
        let at = pair.iter().position(|b| *b == b'=').unwrap_or(pair.len());
        let (name, value) = (&pair[..at], pair.get(at + 1..).unwrap_or_default());
        let name = String::from_utf8_lossy(&decoded(name)).into_owned();
        if wanted(&name) {
            let bytes = decoded(value);
            if bytes.len() > limit {
                return Err(format!("the field {name:?} has more than {limit} bytes"));
            }
            fields.push(Field { name, file_name: None, media_type: None, bytes });
        }
    }
    Ok(fields)
}

fn decoded(text: &[u8]) -> Vec<u8> {
    let spaced: Vec<u8> = text.iter().map(|b| if *b == b'+' { b' ' } else { *b }).collect();
    percent_encoding::percent_decode(&spaced).collect()
}

async fn multipart(
    boundary: &str,
    body: &Bytes,
    limit: usize,
    wanted: impl Fn(&str) -> bool,
) -> Result<Vec<Field>, String> {
    let starts = (0..body.len()).step_by(CHUNK);
    let chunks: Vec<_> =
        starts.map(|at| Ok::<_, Infallible>(body.slice(at..body.len().min(at + CHUNK)))).collect();
    let mut parts = multer::Multipart::new(stream::iter(chunks), boundary);
    let broken = |error: multer::Error| format!("the form cannot be read: {error}");
    let mut fields = Vec::new();
    let mut number = 0;
    while let Some(mut part) = parts.next_field().await.map_err(broken)? {
        number += 1;
        if number > FIELDS {
            return Err(format!("the form has more than {FIELDS} fields"));
        }
        let Some(name) = part.name().map(str::to_owned).filter(|name| wanted(name)) else { continue };
        let file_name = part.file_name().map(str::to_owned);
        let media_type = part.content_type().map(|media_type| media_type.as_ref().to_owned());
        let mut bytes = Vec::new();
        while let Some(chunk) = part.chunk().await.map_err(broken)? {
            if bytes.len() + chunk.len() > limit {
                return Err(format!("the field {name:?} has more than {limit} bytes"));
            }
            bytes.extend_from_slice(&chunk);
        }
        fields.push(Field { name, file_name, media_type, bytes });
    }
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(content_type: &str, body: &[u8], limit: usize) -> Result<Vec<(String, Vec<u8>)>, String> {
        let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, content_type.parse().unwrap())]);
        let encoding = Encoding::of(&headers).ok_or("no form")?;
        let fields = fields(&encoding, &Bytes::copy_from_slice(body), limit, |name| name != "skip").await?;
        Ok(fields.into_iter().map(|field| (field.name, field.bytes)).collect())
    }

    #[tokio::test]
    async fn fields_are_bytes_in_both_encodings() {
        let expected = vec![("a".to_owned(), b"1 \xff&".to_vec()), ("b".to_owned(), Vec::new())];
        let urlencoded = b"a=1+%ff%26&skip=x&b";
        assert_eq!(read("application/x-www-form-urlencoded", urlencoded, 10).await.unwrap(), expected);
        let multipart = b"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n1 \xff&\r\n\
            --x\r\nContent-Disposition: form-data; name=\"skip\"\r\n\r\nx\r\n\
            --x\r\nContent-Disposition: form-data; name=\"b\"\r\n\r\n\r\n--x--\r\n";
        assert_eq!(read("multipart/form-data; boundary=x", multipart, 10).await.unwrap(), expected);
    }

    #[tokio::test]
    async fn what_is_too_much_or_broken_is_refused() {
        let many = "a=1&".repeat(FIELDS + 1);
        let form = "application/x-www-form-urlencoded";
        assert!(read(form, many.as_bytes(), 10).await.unwrap_err().contains("fields"));
        assert!(read(form, b"a=12345678901", 10).await.unwrap_err().contains("10 bytes"));
        let cut = b"--x\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n123";
        assert!(
            read("multipart/form-data; boundary=x", cut, 10).await.unwrap_err().contains("cannot be read")
        );
        for other in ["text/plain", "multipart/form-data", "multipart/mixed; boundary=x"] {
            assert_eq!(read(other, b"", 10).await.unwrap_err(), "no form");
        }
    }
}
