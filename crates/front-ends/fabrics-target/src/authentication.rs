//! Authentication of hosts by DH-HMAC-CHAP on each of their queues ("NVMe Base 2.1", 8.3.5).
//!
//! Until authentication has succeeded, every other command on the queue fails with Authentication
//! Required. Diffie-Hellman arithmetic takes milliseconds, too long for a worker. A thread of the
//! subsystem executes it, one step at a time, however many hosts authenticate.

use crate::slots::Slot;
use crate::target::AssociationMessage;
use dhchap::{AuthStatus, Controller, Failure, Group, Names, Random, Secrets};
use nvme::fabrics::{self, Authentication, Fctype, status};
use nvme::{Command, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::Instant;
use volume::Inbox;

/// Maximum size in bytes of an authentication message and of its buffer.
const MAX_MESSAGE_LEN: u32 = 4096;
/// Minimum size in bytes of the buffer for a message, the length of a failure message.
const MIN_BUFFER_LEN: u32 = 16;
/// Maximum number of steps that wait for the thread; the commands of further hosts fail with a
/// retryable status.
const WAITING: usize = 256;
/// Diffie-Hellman groups that hosts may use. Larger groups are excluded, because a host could make
/// this side use them before it has authenticated.
const GROUPS: &[Group] = &[
    Group::Ffdhe2048,
    Group::Ffdhe3072,
    Group::Ffdhe4096,
    Group::Null,
];

/// NQN of a host that must authenticate, and the secrets for that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostKey {
    /// NQN of the host that must authenticate.
    pub nqn: String,
    /// Secret of the host, and optionally the secret with which the subsystem authenticates to it.
    pub secrets: Secrets,
}

/// State of the host's authentication on one queue.
pub(crate) enum AuthState {
    /// The host has authenticated on the queue, or does not have to.
    Given,
    /// The host has to authenticate on the queue, and has not done so yet.
    Wanted {
        side: Box<Controller>,
        since: Instant,
    },
    /// The thread executes a step. The number distinguishes it from steps of an earlier queue with
    /// the same identifier.
    Away { since: Instant, number: u64 },
    /// Authentication has failed. The host cannot try again on this queue.
    Failed { since: Instant },
}

/// Result of one step of an authentication.
#[derive(Debug)]
pub(crate) struct AuthResult {
    number: u64,
    side: Box<Controller>,
    step: AuthStatus,
    /// Message that the host has requested, if it has requested one.
    pub message: Option<Vec<u8>>,
}

/// Authentication step with slow arithmetic (Diffie-Hellman), and the command that waits for it.
struct Job {
    number: u64,
    side: Box<Controller>,
    /// Message from the host; `None` if the host requests one.
    message: Option<Vec<u8>>,
    qid: u16,
    place: u16,
    inbox: Arc<Inbox<AssociationMessage>>,
}

/// Handle of the thread that executes slow steps of authentication.
#[derive(Debug)]
pub(crate) struct Prover(SyncSender<Job>);

impl Prover {
    /// Starts the thread, which ends when the handle is dropped. Returns `None` if no thread can be
    /// started.
    pub(crate) fn start() -> Option<Self> {
        let (sender, jobs) = sync_channel::<Job>(WAITING);
        let thread = std::thread::Builder::new().name("nvme-auth".into());
        let run = move || {
            for job in jobs {
                let Job {
                    number,
                    side,
                    message,
                    qid,
                    place,
                    inbox,
                } = job;
                let outcome = step(number, side, message.as_deref());
                inbox.put(AssociationMessage::Proven {
                    qid,
                    place,
                    outcome: Box::new(outcome),
                });
            }
        };
        thread.spawn(run).ok().map(|_| Self(sender))
    }
}

/// Executes one step: handles the host's message, or creates the message that the host requests.
fn step(number: u64, mut side: Box<Controller>, message: Option<&[u8]>) -> AuthResult {
    match message {
        Some(message) => {
            let step = side.take(message);
            AuthResult {
                number,
                side,
                step,
                message: None,
            }
        }
        None => {
            let answer = side.answer();
            AuthResult {
                number,
                side,
                step: answer.step,
                message: Some(answer.message),
            }
        }
    }
}

/// Outcome of starting an authentication step.
pub(crate) enum SubmittedStep {
    /// The step is complete, and the command can be answered.
    Done(AuthResult),
    /// The thread executes the step, and its result arrives later.
    Away,
    /// The thread has too many steps to execute, so the command is refused.
    Full,
}

impl AuthState {
    /// Creates the state of a new queue of a host with these secrets.
    ///
    /// # Errors
    /// The error of the kernel, if it has no random numbers.
    pub(crate) fn wanted(
        names: Names,
        secrets: Secrets,
        prover: bool,
        since: Instant,
    ) -> std::io::Result<Self> {
        let groups = if prover { GROUPS } else { &[Group::Null] };
        let side = Controller::new(names, secrets, Random::new()?).with_groups(groups);
        let side = Box::new(side);
        Ok(Self::Wanted { side, since })
    }

    pub(crate) const fn is_given(&self) -> bool {
        matches!(self, Self::Given)
    }

    /// Returns the time at which the authentication of the queue began; `None` once it has
    /// succeeded.
    pub(crate) const fn since(&self) -> Option<Instant> {
        match self {
            Self::Given => None,
            Self::Wanted { since, .. } | Self::Away { since, .. } | Self::Failed { since } => {
                Some(*since)
            }
        }
    }

    /// Returns the status that refuses a command before authentication; `None` for a valid
    /// authentication command. `len`: length of the command's data in bytes.
    pub(crate) fn refuses(&self, command: &Command, len: u32) -> Option<Status> {
        let is_receive = match fabrics::fctype(command) {
            Some(Fctype::AUTHENTICATION_SEND) => false,
            Some(Fctype::AUTHENTICATION_RECEIVE) => true,
            _ => return Some(status::AUTHENTICATION_REQUIRED),
        };
        let asked = Authentication::from_command(command);
        let least = if is_receive { MIN_BUFFER_LEN } else { 1 };
        if !asked.is_nvme() || asked.len != len || !(least..=MAX_MESSAGE_LEN).contains(&len) {
            return Some(Status::INVALID_FIELD);
        }
        match self {
            Self::Away { .. } => Some(Status::COMMAND_SEQUENCE_ERROR),
            Self::Failed { .. } => Some(status::AUTHENTICATION_REQUIRED),
            Self::Wanted { .. } | Self::Given => None,
        }
    }

    /// Starts the step for the authentication command in a slot of queue `qid`.
    pub(crate) fn step(
        &mut self,
        message: Option<Vec<u8>>,
        (qid, place): (u16, u16),
        prover: Option<&Prover>,
        inbox: &Arc<Inbox<AssociationMessage>>,
    ) -> Option<SubmittedStep> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let Self::Wanted { since, .. } = self else {
            return None;
        };
        let (since, number) = (*since, NUMBER.fetch_add(1, Ordering::Relaxed));
        let Self::Wanted { side, .. } = std::mem::replace(self, Self::Away { since, number })
        else {
            return None;
        };
        let Some(prover) = prover.filter(|_| side.is_slow()) else {
            return Some(SubmittedStep::Done(step(number, side, message.as_deref())));
        };
        let job = Job {
            number,
            side,
            message,
            qid,
            place,
            inbox: inbox.clone(),
        };
        match prover.0.try_send(job) {
            Ok(()) => Some(SubmittedStep::Away),
            Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) => {
                let side = job.side;
                *self = Self::Wanted { side, since };
                Some(SubmittedStep::Full)
            }
        }
    }

    /// Handles the result of a step. Returns the message for the host, and the reason if
    /// authentication failed; `None` if the step belongs to another queue.
    pub(crate) fn ended(
        &mut self,
        outcome: AuthResult,
    ) -> Option<(Option<Vec<u8>>, Option<Failure>)> {
        let AuthResult {
            number,
            side,
            step,
            message,
        } = outcome;
        let since = match self {
            Self::Away { since, number: of } if *of == number => *since,
            _ => return None,
        };
        let (state, failed) = match step {
            AuthStatus::Authenticated => (Self::Given, None),
            AuthStatus::Next => (Self::Wanted { side, since }, None),
            // The host may still request the reason; the answer ends the authentication.
            AuthStatus::Failed(why) if message.is_none() => {
                (Self::Wanted { side, since }, Some(why))
            }
            AuthStatus::Failed(_) => (Self::Failed { since }, None),
        };
        *self = state;
        Some((message, failed))
    }
}

/// Returns whether the command in a slot is an authentication command.
pub(crate) fn is_of_proof(slot: &Slot) -> bool {
    matches!(
        fabrics::fctype(&slot.command),
        Some(Fctype::AUTHENTICATION_SEND | Fctype::AUTHENTICATION_RECEIVE)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use dhchap::{Host, Secret};

    fn secrets() -> Secrets {
        let text = "DHHC-1:01:AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyAl7OaH:";
        Secrets {
            host: Secret::parse(text).unwrap(),
            controller: None,
        }
    }

    fn names() -> Names {
        Names {
            host: "nqn.2014-08.org.vnvme:h".into(),
            subsystem: "nqn.2014-08.org.vnvme:s".into(),
        }
    }

    fn wanted() -> AuthState {
        AuthState::wanted(names(), secrets(), false, Instant::now()).unwrap()
    }

    /// Executes a step of an authentication without the thread.
    fn step(
        proof: &mut AuthState,
        message: Option<Vec<u8>>,
        inbox: &Arc<Inbox<AssociationMessage>>,
    ) -> AuthResult {
        match proof.step(message, (0, 0), None, inbox) {
            Some(SubmittedStep::Done(outcome)) => outcome,
            _ => panic!("it was not done"),
        }
    }

    /// Checks that a result that arrives after its queue was closed does not authenticate a new
    /// queue with the same identifier.
    #[test]
    fn late_proof_of_closed_queue_does_not_authenticate_next() {
        let inbox = Inbox::new(&volume::Io::new(volume::IoOptions::default())).unwrap();
        let (mut first, mut next) = (wanted(), wanted());
        let mut host = Host::new(names(), secrets(), Random::new().unwrap());
        let outcome = step(&mut first, Some(host.negotiate()), &inbox);
        first.ended(outcome).unwrap();
        let outcome = step(&mut first, None, &inbox);
        let (challenge, _) = first.ended(outcome).unwrap();
        let reply = host.reply(&challenge.unwrap()).unwrap();
        let outcome = step(&mut first, Some(reply), &inbox);
        first.ended(outcome).unwrap();
        let proven = step(&mut first, None, &inbox);
        // The next queue has a step under way, too.
        let _away = step(&mut next, Some(host.negotiate()), &inbox);
        assert!(next.ended(proven).is_none() && !next.is_given());
        let mut again = wanted();
        assert!(again.refuses(&Command::new(6, 0, 0), 0).is_some());
        let failed = step(&mut again, None, &inbox);
        assert!(again.ended(failed).is_some() && !again.is_given());
        assert!(
            again.step(None, (0, 0), None, &inbox).is_none(),
            "once only"
        );
        assert!(!again.is_given());
    }
}
