//! State machine of the host in DH-HMAC-CHAP authentication of one queue.

use crate::group::Group;
use crate::hash::Hash;
use crate::message::{self, Challenge, Failure, Kind, Reply};
use crate::random::Random;
use crate::{Names, Secrets};
use zeroize::Zeroizing;

/// Reason why authentication failed, as the host sees it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthFailure {
    /// The controller has ended the transaction.
    #[error("the controller reports: {0}")]
    ByController(Failure),
    /// The controller failed to authenticate, or violated the protocol.
    #[error("{why}")]
    ByHost {
        /// Reason of the failure.
        why: Failure,
        /// Message that reports the failure to the controller.
        message: Vec<u8>,
    },
}

/// State after the reply to the controller's challenge.
struct Replied {
    hash: Hash,
    /// Host's challenge as it enters the response, augmented by the session key if there is one.
    challenge: Zeroizing<Vec<u8>>,
}

/// The host's side of the authentication of one queue.
pub struct Host {
    names: Names,
    secrets: Secrets,
    random: Random,
    replied: Option<Replied>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Host {
    /// Creates the host's side for a queue whose Connect command returned Authentication Required.
    /// If the secrets include one of the controller, the controller must authenticate, too.
    pub const fn new(names: Names, secrets: Secrets, random: Random) -> Self {
        Self {
            names,
            secrets,
            random,
            replied: None,
        }
    }

    /// Encodes the first message, AUTH_Negotiate.
    pub fn negotiate(&self) -> Vec<u8> {
        message::negotiate(self.random.transaction, &Hash::ALL, &Group::ALL)
    }

    /// Encodes the reply to the controller's challenge.
    ///
    /// # Errors
    /// [`AuthFailure`] when the controller reports a failure or its challenge is invalid; the
    /// connection is then unusable.
    pub fn reply(&mut self, message: &[u8]) -> Result<Vec<u8>, AuthFailure> {
        let challenge = self.read(message, |message, transaction| {
            Challenge::parse(message, transaction)
        })?;
        let hash = Hash::of(challenge.hash).ok_or_else(|| self.refuse(Failure::HASH))?;
        let group = Group::of(challenge.group).ok_or_else(|| self.refuse(Failure::GROUP))?;
        let (c1, s1) = (challenge.challenge, challenge.sequence);
        if c1.len() != hash.len() || challenge.public.len() != group.len() {
            return Err(self.refuse(Failure::PAYLOAD));
        }
        let public = group.public(&self.random.exponent);
        let session = match group {
            Group::Null => None,
            group => {
                let shared = group.shared(challenge.public, &self.random.exponent);
                let shared = shared.ok_or_else(|| self.refuse(Failure::PAYLOAD))?;
                Some(hash.digest(&Zeroizing::new(shared)))
            }
        };
        let augment = |challenge: &[u8]| augmented(hash, session.as_deref(), challenge);
        let transaction = self.random.transaction;
        let c1 = augment(c1);
        let key = self.secrets.host.key(&self.names.host);
        let (s1, number) = (s1.to_le_bytes(), transaction.to_le_bytes());
        let response = hash.hmac(&key, &of_host(&c1, &s1, &number, &self.names));
        let own = self.random.challenge.get(..hash.len()).unwrap_or_default();
        let asks = self.secrets.controller.is_some();
        let reply = Reply {
            response: &response,
            challenge: asks.then_some(own),
            sequence: if asks { self.random.sequence } else { 0 },
            public: &public,
        };
        let message = reply.message(transaction);
        let challenge = augment(own);
        self.replied = Some(Replied { hash, challenge });
        Ok(message)
    }

    /// Handles the controller's success message. Returns the message to send next, if any.
    ///
    /// # Errors
    /// [`AuthFailure`] when the controller reports a failure or its response is wrong; the
    /// connection is then unusable.
    pub fn conclude(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>, AuthFailure> {
        let Some(Replied { hash, challenge }) = self.replied.take() else {
            return Err(self.refuse(Failure::ORDER));
        };
        let response = self.read(message, |message, transaction| {
            message::response(message, transaction, hash)
        })?;
        let Some(secret) = &self.secrets.controller else {
            return Ok(None);
        };
        let transaction = self.random.transaction.to_le_bytes();
        let sequence = self.random.sequence.to_le_bytes();
        let parts = of_controller(&challenge, &sequence, &transaction, &self.names);
        let key = secret.key(&self.names.subsystem);
        let proven = response.is_some_and(|found| hash.is_hmac(&key, &parts, found));
        if proven {
            Ok(Some(message::success2(self.random.transaction)))
        } else {
            Err(self.refuse(Failure::FAILED))
        }
    }

    fn read<'a, T>(
        &self,
        message: &'a [u8],
        parse: impl FnOnce(&'a [u8], u16) -> Result<T, Failure>,
    ) -> Result<T, AuthFailure> {
        if let Some(why) = message::failed(message, Kind::FAILURE1) {
            return Err(AuthFailure::ByController(why));
        }
        parse(message, self.random.transaction).map_err(|why| self.refuse(why))
    }

    fn refuse(&self, why: Failure) -> AuthFailure {
        let message = message::failure(Kind::FAILURE2, self.random.transaction, why);
        AuthFailure::ByHost { why, message }
    }
}

/// Returns a challenge as it enters the response, augmented by the session key if there is one.
pub(crate) fn augmented(
    hash: Hash,
    session: Option<&Vec<u8>>,
    challenge: &[u8],
) -> Zeroizing<Vec<u8>> {
    match session {
        Some(session) => hash.hmac(session, &[challenge]),
        None => Zeroizing::new(challenge.to_vec()),
    }
}

/// Returns the HMAC input of the host's response.
pub(crate) fn of_host<'a>(
    challenge: &'a [u8],
    sequence: &'a [u8; 4],
    transaction: &'a [u8; 2],
    names: &'a Names,
) -> [&'a [u8]; 8] {
    let numbers = (sequence, transaction);
    proven(
        b"HostHost",
        challenge,
        numbers,
        [&names.host, &names.subsystem],
    )
}

/// Returns the HMAC input of the controller's response.
pub(crate) fn of_controller<'a>(
    challenge: &'a [u8],
    sequence: &'a [u8; 4],
    transaction: &'a [u8; 2],
    names: &'a Names,
) -> [&'a [u8]; 8] {
    let numbers = (sequence, transaction);
    proven(
        b"Controller",
        challenge,
        numbers,
        [&names.subsystem, &names.host],
    )
}

/// Returns the parts of a response's HMAC input, with the NQNs of the responder and the other side.
/// The first 0 means no secure channel.
fn proven<'a>(
    label: &'a [u8],
    challenge: &'a [u8],
    (sequence, transaction): (&'a [u8; 4], &'a [u8; 2]),
    [own, other]: [&'a str; 2],
) -> [&'a [u8]; 8] {
    let (own, other) = (own.as_bytes(), other.as_bytes());
    [
        challenge,
        sequence,
        transaction,
        &[0],
        label,
        own,
        &[0],
        other,
    ]
}
