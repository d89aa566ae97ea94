//! What the server makes of idempotency keys.

use super::http::{Reply, Request};
use super::{Manners, State};

/// What a server that announces idempotency keys makes of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeysAre {
    /// A commit under a known key gets the answer to the first one, whatever it says.
    #[default]
    Known,
    /// As `Known`; one that says something else is refused.
    Compared,
    Ignored,
    /// Known, if the body is the same.
    PartOfTheBody,
}

pub(super) struct KnownKey {
    key: String,
    asked: String,
    status: u16,
    told: String,
}

impl State {
    /// The answer to a commit under a key that was used.
    pub(super) fn known(&self, manners: &Manners, request: &Request) -> Option<Reply> {
        let key = key_of(manners, request)?;
        let known = self.known_keys.iter().find(|known| known.key == *key)?;
        match manners.keys {
            KeysAre::Compared if known.asked != request.body => {
                Some(Reply::error(422, "ValidationException", "the key was used for another request"))
            }
            KeysAre::PartOfTheBody if known.asked != request.body => None,
            _ => Some(Reply::json(known.status, known.told.clone())),
        }
    }

    pub(super) fn remember(&mut self, manners: &Manners, request: &Request, reply: &Reply) {
        if let Some(key) = key_of(manners, request) {
            let (key, asked) = (key.clone(), request.body.clone());
            self.known_keys.push(KnownKey { key, asked, status: reply.status, told: reply.body.clone() });
        }
    }
}

fn key_of<'a>(manners: &Manners, request: &'a Request) -> Option<&'a String> {
    let knows = manners.idempotency_keys && manners.keys != KeysAre::Ignored;
    request.headers.get("idempotency-key").filter(|_| knows)
}
