//! As much HTTP/1.1 as the fault server needs, by hand: a library would not break off in the middle of a reply.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::future::BoxFuture;
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

/// A request, read to its end.
#[derive(Clone, Debug)]
pub struct Request {
    pub method: String,
    /// As it was sent, encoded.
    pub path: String,
    pub query: BTreeMap<String, String>,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    pub body: String,
}

impl Request {
    /// The path's segments, decoded one by one.
    pub fn segments(&self) -> Vec<String> {
        self.path.trim_matches('/').split('/').map(decoded).collect()
    }
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: String,
    pub cut: Cut,
}

/// Where a reply ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Whole,
    /// In the middle of its body, whose length was told.
    Half,
    /// Before its first byte.
    Silent,
}

impl Reply {
    pub fn json(status: u16, body: String) -> Self {
        Self { status, headers: Vec::new(), body, cut: Cut::Whole }
    }

    pub fn error(status: u16, kind: &str, message: &str) -> Self {
        let error = serde_json::json!({ "message": message, "type": kind, "code": status });
        Self::json(status, serde_json::json!({ "error": error }).to_string())
    }

    pub fn with_header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }

    pub fn cut(mut self, cut: Cut) -> Self {
        self.cut = cut;
        self
    }
}

pub type Handler = Arc<dyn Fn(Request) -> BoxFuture<'static, Reply> + Send + Sync>;

/// Serves on loopback until the handle is aborted. Gives the address without a path.
pub async fn serve(handler: Handler) -> (String, JoinHandle<()>) {
    serve_over(handler, None).await
}

/// As [`serve`]; over TLS for the name `localhost`.
pub async fn serve_over(handler: Handler, tls: Option<TlsAcceptor>) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = match tls {
        Some(_) => format!("https://localhost:{port}"),
        None => format!("http://127.0.0.1:{port}"),
    };
    let serving = tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (handler, tls) = (Arc::clone(&handler), tls.clone());
            // A connection that ends in the middle is the client's business, or ours on purpose.
            tokio::spawn(async move {
                let Some(tls) = tls else { return converse(stream, handler).await.ok() };
                converse(tls.accept(stream).await.ok()?, handler).await.ok()
            });
        }
    });
    (address, serving)
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin, handler: Handler) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    while let Some(request) = read(&mut stream).await? {
        let Reply { status, headers, body, cut } = handler(request).await;
        if cut == Cut::Silent {
            return Ok(());
        }
        let mut head = format!("HTTP/1.1 {status} .\r\ncontent-type: application/json\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n", body.len()));
        stream.write_all(head.as_bytes()).await?;
        let end = if cut == Cut::Half { body.len() / 2 } else { body.len() };
        stream.write_all(&body.as_bytes()[..end]).await?;
        stream.flush().await?;
        if cut == Cut::Half {
            return Ok(());
        }
    }
    Ok(())
}

/// `None`: the client has closed the connection.
async fn read(stream: &mut BufReader<impl AsyncRead + Unpin>) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if stream.read_line(&mut line).await? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |text: &String| text.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Ok(Some(Request {
        method,
        path: path.to_owned(),
        query: form(query),
        headers,
        body: String::from_utf8(body).unwrap(),
    }))
}

/// `application/x-www-form-urlencoded`.
pub fn form(text: &str) -> BTreeMap<String, String> {
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(&key.replace('+', " ")), decoded(&value.replace('+', " ")))
        })
        .collect()
}

fn decoded(text: &str) -> String {
    percent_decode_str(text).decode_utf8().unwrap().into_owned()
}
