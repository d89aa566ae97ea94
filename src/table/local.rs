//! Files of a table that lies on this machine. The crate's storage layer reads one in several steps, each on
//! another thread; for the small files that branches consist of, the way costs more than the reading. So
//! whoever is on a thread for blocking work already reads them here, at once.

use std::io::ErrorKind;
use std::iter::Peekable;
use std::path::PathBuf;

use super::error::TableError;
use super::storage;

/// The path behind a location, when it is on this machine.
pub(super) fn path_of(location: &str) -> Option<PathBuf> {
    storage::local_path(location)
}

/// The content of a local file. Blocks.
pub(super) fn read(location: &str) -> Result<Vec<u8>, TableError> {
    let path = here(location)?;
    std::fs::read(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => TableError::Missing { path: location.to_owned() },
        _ => TableError::io(location, error),
    })
}

/// Is there such a file? Blocks.
pub(super) fn exists(location: &str) -> Result<bool, TableError> {
    let path = here(location)?;
    path.try_exists().map_err(|error| TableError::io(location, error))
}

/// The most pieces of work that one thread does after another.
const MOST_OF_GROUP: usize = 64;
/// A group is full when its pieces weigh so much together.
const FULL_GROUP: usize = 1_000;

/// Pieces of work on local files, in their order, in groups for one thread each: handing every small file to a thread
/// of its own takes longer than the file, and threads that create files in one folder wait for each other.
pub(super) fn groups<T>(
    pieces: impl IntoIterator<Item = T>,
    weight: impl Fn(&T) -> usize,
) -> impl Iterator<Item = Vec<T>> {
    let mut pieces: Peekable<_> = pieces.into_iter().peekable();
    std::iter::from_fn(move || {
        let mut group = vec![pieces.next()?];
        let mut total = weight(group.first()?);
        while let Some(next) = pieces.peek().map(&weight)
            && group.len() < MOST_OF_GROUP
            && total + next <= FULL_GROUP
        {
            group.extend(pieces.next());
            total += next;
        }
        Some(group)
    })
}

fn here(location: &str) -> Result<PathBuf, TableError> {
    path_of(location).ok_or_else(|| TableError::Internal(format!("{location} is not on this machine")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_order_in_groups_that_are_full_or_long_enough() {
        let sizes = |weights: &[usize]| -> Vec<usize> {
            let all: Vec<Vec<(usize, usize)>> =
                groups(weights.iter().copied().enumerate(), |(_, weight)| *weight).collect();
            let flat: Vec<usize> = all.iter().flatten().map(|(at, _)| *at).collect();
            assert_eq!(flat, (0..weights.len()).collect::<Vec<_>>());
            all.iter().map(Vec::len).collect()
        };

        assert_eq!(sizes(&[]), [0; 0]);
        assert_eq!(sizes(&[1; 130]), [64, 64, 2]);
        assert_eq!(sizes(&[400, 600, 1, 5_000, 5_000, 0]), [2, 1, 1, 1, 1]);
    }
}
