//! The last bytes of a stream of unknown length.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncRead, AsyncReadExt};

use super::MAX_OUTPUT_BYTES;

/// Shared by the streams that write into it.
#[derive(Clone, Default)]
pub(super) struct Tail(Arc<Mutex<Vec<u8>>>);

impl Tail {
    pub fn push(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(bytes);
        let surplus = kept.len().saturating_sub(MAX_OUTPUT_BYTES);
        kept.drain(..surplus);
    }

    /// Reads to the stream's end; an error is an end.
    pub async fn read(self, mut from: impl AsyncRead + Unpin) {
        let mut buffer = [0_u8; 4096];
        while let Ok(read) = from.read(&mut buffer).await {
            if read == 0 {
                return;
            }
            self.push(&buffer[..read]);
        }
    }

    /// `None`: nothing came. What no terminal or database takes is left out.
    pub fn text(&self) -> Option<String> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept);
        let shown: String = text.chars().filter(|c| *c == '\n' || *c == '\t' || !c.is_control()).collect();
        let shown = shown.trim();
        (!shown.is_empty()).then(|| shown.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_bytes_are_kept_whatever_was_written() {
        let tail = Tail::default();
        assert_eq!(tail.text(), None);
        let long = "x".repeat(3 * MAX_OUTPUT_BYTES) + "\u{1b}[31mthe\0 end\n";
        tail.clone().read(long.as_bytes()).await;
        let text = tail.text().unwrap();
        assert!(text.ends_with("[31mthe end") && text.len() <= MAX_OUTPUT_BYTES, "{}", text.len());
        // A character that was cut in two is shown as such.
        let tail = Tail::default();
        tail.push(&[0xbc, b'a']);
        assert_eq!(tail.text().unwrap(), "\u{fffd}a");
    }
}
