//! Decoders that panic on damaged content instead of failing: an error that names the file, and no noise.
//!
//! The Avro crate unwraps names of a schema that it read from a file. A file is foreign input, so that is an
//! ordinary fault here, caught where the decoder is called.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use super::error::TableError;

thread_local! {
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Runs a decoder over the content of the file at `path`.
pub(super) fn guarded<T, E: std::fmt::Display>(
    path: &str,
    decode: impl FnOnce() -> Result<T, E>,
) -> Result<T, TableError> {
    quiet();
    GUARDED.set(true);
    // What the decoder leaves behind when it panics is dropped with it.
    let decoded = catch_unwind(AssertUnwindSafe(decode));
    GUARDED.set(false);
    match decoded {
        Ok(decoded) => decoded.map_err(|error| TableError::corrupt(path, error)),
        Err(_) => Err(TableError::corrupt(path, "its decoder gave up on the content")),
    }
}

/// The message of a panic that is caught above would be read as a crash of the program.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if !GUARDED.get() {
                others(panic);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_decoder_is_an_error_of_its_file() {
        let decode = || -> Result<(), String> { panic!("an index out of bounds") };
        let error = guarded("file:///m0.avro", decode).unwrap_err();
        assert!(matches!(&error, TableError::Corrupt { path, .. } if path == "file:///m0.avro"), "{error}");
        assert!(!GUARDED.get());
        assert_eq!(guarded("file:///m0.avro", || Ok::<_, String>(1)).unwrap(), 1);
    }
}
