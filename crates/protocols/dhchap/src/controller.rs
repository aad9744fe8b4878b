//! State machine of the controller in DH-HMAC-CHAP authentication of one queue.

use crate::group::Group;
use crate::hash::Hash;
use crate::host::{augmented, of_controller, of_host};
use crate::message::{self, Challenge, Failure, Kind, Reply};
use crate::random::Random;
use crate::{Names, Secrets};
use zeroize::Zeroizing;

/// Effect of a message on the authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthStatus {
    /// The message was accepted, and the host requests the next one.
    Next,
    /// The host has authenticated, and the transaction is complete.
    Authenticated,
    /// The transaction has failed. The host may request the reason; the queue is unusable.
    Failed(Failure),
}

/// Message from the controller to the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Encoded message.
    pub message: Vec<u8>,
    /// State of the authentication after this message.
    pub step: AuthStatus,
}

struct Negotiated {
    transaction: u16,
    hash: Hash,
    group: Group,
}

/// State of a transaction.
enum State {
    /// Waits for the host's AUTH_Negotiate.
    Waits,
    /// The host will request the challenge.
    Challenges(Negotiated),
    /// The challenge was sent, and the host's reply is expected.
    Challenged(Negotiated),
    /// The host will request the success message, which contains the response to its own challenge.
    Succeeds {
        transaction: u16,
        hash: Hash,
        response: Option<Zeroizing<Vec<u8>>>,
    },
    /// The host's confirmation of the controller's response is expected.
    Asked { transaction: u16 },
    /// The transaction is complete.
    Authenticated,
    /// The transaction has failed; the host may request the reason.
    Failed { transaction: u16, why: Failure },
}

impl State {
    /// Placeholder until the next state is known.
    const FAILED: State = State::Failed {
        transaction: 0,
        why: Failure::ORDER,
    };
}

/// The controller's side of the authentication of one queue.
pub struct Controller {
    names: Names,
    secrets: Secrets,
    random: Random,
    groups: &'static [Group],
    state: State,
}

impl std::fmt::Debug for Controller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Controller")
            .field("names", &self.names)
            .finish_non_exhaustive()
    }
}

impl Controller {
    /// Creates the controller's side for a new queue of a host with a known secret.
    pub const fn new(names: Names, secrets: Secrets, random: Random) -> Self {
        Self {
            names,
            secrets,
            random,
            groups: &Group::ALL,
            state: State::Waits,
        }
    }

    /// Restricts the Diffie-Hellman groups that the controller accepts.
    #[must_use]
    pub const fn with_groups(mut self, groups: &'static [Group]) -> Self {
        self.groups = groups;
        self
    }

    /// Returns whether the next step needs Diffie-Hellman arithmetic, which is too slow for a
    /// thread that serves other connections.
    pub const fn is_slow(&self) -> bool {
        match &self.state {
            State::Challenges(negotiated) | State::Challenged(negotiated) => {
                !negotiated.group.is_null()
            }
            _ => false,
        }
    }

    /// Returns whether the host has authenticated.
    pub const fn is_authenticated(&self) -> bool {
        matches!(self.state, State::Authenticated)
    }

    /// Handles a message from the host.
    pub fn take(&mut self, message: &[u8]) -> AuthStatus {
        let state = std::mem::replace(&mut self.state, State::FAILED);
        let transaction = match &state {
            State::Waits | State::Authenticated => {
                message::head(message).map_or(0, |(_, transaction)| transaction)
            }
            State::Challenges(negotiated) | State::Challenged(negotiated) => negotiated.transaction,
            State::Succeeds { transaction, .. }
            | State::Asked { transaction }
            | State::Failed { transaction, .. } => *transaction,
        };
        let next = match (message::failed(message, Kind::FAILURE2), state) {
            (Some(why), _) => Err(why),
            (None, State::Waits) => self.negotiated(message),
            (None, State::Challenged(negotiated)) => self.replied(message, &negotiated),
            (None, State::Asked { transaction }) => match message::head(message) {
                Some((Kind::SUCCESS2, of)) if of == transaction && message.len() >= 16 => {
                    Ok(State::Authenticated)
                }
                Some((Kind::SUCCESS2, _)) | None => Err(Failure::PAYLOAD),
                Some(_) => Err(Failure::ORDER),
            },
            (None, State::Failed { why, .. }) => Err(why),
            (None, _) => Err(Failure::ORDER),
        };
        match next {
            Ok(state) => {
                self.state = state;
                match self.state {
                    State::Authenticated => AuthStatus::Authenticated,
                    _ => AuthStatus::Next,
                }
            }
            Err(why) => {
                self.state = State::Failed { transaction, why };
                AuthStatus::Failed(why)
            }
        }
    }

    /// Returns the message that the host has requested.
    pub fn answer(&mut self) -> Answer {
        let state = std::mem::replace(&mut self.state, State::FAILED);
        let (message, state) = match state {
            State::Challenges(negotiated) => {
                let message = self.challenge(&negotiated);
                (message, State::Challenged(negotiated))
            }
            State::Succeeds {
                transaction,
                hash,
                response,
            } => {
                let found = response.as_ref().map(|response| response.as_slice());
                let message = message::success1(transaction, hash, found);
                let state = match response {
                    Some(_) => State::Asked { transaction },
                    None => State::Authenticated,
                };
                (message, state)
            }
            State::Failed { transaction, why } => {
                let message = message::failure(Kind::FAILURE1, transaction, why);
                (message, State::Failed { transaction, why })
            }
            // No message is due in this state.
            _ => {
                let (transaction, why) = (0, Failure::ORDER);
                let message = message::failure(Kind::FAILURE1, transaction, why);
                (message, State::Failed { transaction, why })
            }
        };
        self.state = state;
        let step = match self.state {
            State::Authenticated => AuthStatus::Authenticated,
            State::Failed { why, .. } => AuthStatus::Failed(why),
            _ => AuthStatus::Next,
        };
        Answer { message, step }
    }

    fn negotiated(&self, message: &[u8]) -> Result<State, Failure> {
        let (transaction, hash, group) = message::negotiated(message, &Hash::ALL, self.groups)?;
        Ok(State::Challenges(Negotiated {
            transaction,
            hash,
            group,
        }))
    }

    fn challenge(&self, negotiated: &Negotiated) -> Vec<u8> {
        let Negotiated {
            transaction,
            hash,
            group,
        } = *negotiated;
        let public = group.public(&self.random.exponent);
        let challenge = Challenge {
            hash: hash.id(),
            group: group.id(),
            sequence: self.random.sequence,
            challenge: self.random.challenge.get(..hash.len()).unwrap_or_default(),
            public: &public,
        };
        challenge.message(transaction)
    }

    fn replied(&self, message: &[u8], negotiated: &Negotiated) -> Result<State, Failure> {
        let Negotiated {
            transaction,
            hash,
            group,
        } = *negotiated;
        let reply = Reply::parse(message, transaction, hash)?;
        let session = match group {
            Group::Null if reply.public.is_empty() => None,
            Group::Null => return Err(Failure::PAYLOAD),
            group => {
                let shared = group.shared(reply.public, &self.random.exponent);
                let shared = shared.ok_or(Failure::PAYLOAD)?;
                Some(hash.digest(&Zeroizing::new(shared)))
            }
        };
        let augment = |challenge: &[u8]| augmented(hash, session.as_deref(), challenge);
        let number = transaction.to_le_bytes();
        let own = augment(self.random.challenge.get(..hash.len()).unwrap_or_default());
        let sequence = self.random.sequence.to_le_bytes();
        let parts = of_host(&own, &sequence, &number, &self.names);
        let key = self.secrets.host.key(&self.names.host);
        if !hash.is_hmac(&key, &parts, reply.response) {
            return Err(Failure::FAILED);
        }
        let response = match (reply.challenge, &self.secrets.controller) {
            (None, _) => None,
            // The host requests authentication of the controller, which has no secret for that.
            (Some(_), None) => return Err(Failure::FAILED),
            (Some(challenge), Some(secret)) => {
                let own = self.random.challenge.get(..hash.len()).unwrap_or_default();
                // A challenge reflected to its sender proves nothing ("NVMe Base 2.1", 8.3.5.5.4).
                if challenge == own || reply.sequence == 0 {
                    return Err(Failure::PAYLOAD);
                }
                let challenge = augment(challenge);
                let sequence = reply.sequence.to_le_bytes();
                let parts = of_controller(&challenge, &sequence, &number, &self.names);
                let key = secret.key(&self.names.subsystem);
                Some(hash.hmac(&key, &parts))
            }
        };
        Ok(State::Succeeds {
            transaction,
            hash,
            response,
        })
    }
}
