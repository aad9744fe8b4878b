//! Verdicts of cases, and the helpers with which cases are written.

use nvme::Status;
use test_host::Completion;
use vfio_user::client::ClientError;

/// Reason why a case did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The controller violates the standard: the text has the expected and the actual result.
    Failed(String),
    /// The controller lacks the feature of the case: the text has its report.
    NotApplicable(String),
}

/// Result of a case, or of a step of one.
pub type Check<T = ()> = Result<T, Verdict>;

/// Ends the case as failed, with this text.
pub fn failed<T>(text: impl Into<String>) -> Check<T> {
    Err(Verdict::Failed(text.into()))
}

/// Ends the case as not applicable, for this reason.
pub fn not_applicable<T>(reason: impl Into<String>) -> Check<T> {
    Err(Verdict::NotApplicable(reason.into()))
}

/// Ends the case as not applicable unless the condition holds.
pub fn applies_if(condition: bool, otherwise: &str) -> Check {
    if condition {
        Ok(())
    } else {
        not_applicable(otherwise)
    }
}

/// Fails with a formatted text unless the condition holds.
macro_rules! require {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::verdict::Verdict::Failed(format!($($text)+)));
        }
    };
}

/// Fails unless two numbers are equal; the text names both.
macro_rules! same {
    ($got:expr, $expected:expr, $($what:tt)+) => {{
        let (got, expected) = (u128::from($got), u128::from($expected));
        if got != expected {
            return Err($crate::verdict::Verdict::Failed(format!(
                "{}: expected {expected:#x}, got {got:#x}",
                format!($($what)+)
            )));
        }
    }};
}

pub(crate) use {require, same};

impl From<ClientError> for Verdict {
    fn from(error: ClientError) -> Self {
        anyhow::Error::from(error).into()
    }
}

impl From<anyhow::Error> for Verdict {
    fn from(error: anyhow::Error) -> Self {
        if error.is::<ClientError>() {
            return Verdict::Failed(format!("the server: {error:#}"));
        }
        Verdict::Failed(format!("{error:#}"))
    }
}

impl From<dma::MemoryError> for Verdict {
    fn from(error: dma::MemoryError) -> Self {
        Verdict::Failed(format!("the host's own memory: {error}"))
    }
}

impl From<rustix::io::Errno> for Verdict {
    fn from(error: rustix::io::Errno) -> Self {
        Verdict::Failed(format!("a system call of the host: {error}"))
    }
}

/// Checks of a completion.
pub trait Expect {
    /// Returns the completion's status.
    fn status(&self) -> Status;
    /// Checks that the status is this one, ignoring the flags.
    fn expect(&self, status: Status, what: &str) -> Check;
    /// Checks that the status is among `statuses`.
    fn expect_one(&self, statuses: &[Status], what: &str) -> Check;
    /// Checks that the command succeeded.
    fn succeeds(&self, what: &str) -> Check;
    /// Checks for this status with Do Not Retry: the same command would fail again.
    fn refused(&self, status: Status, what: &str) -> Check;
    /// Checks that the command failed with any status.
    fn fails(&self, what: &str) -> Check;
}

fn name(status: Status) -> String {
    let (sct, sc) = (status.sct().0, status.sc());
    format!("{status} [{sct:x}h/{sc:02x}h]")
}

impl Expect for Completion {
    fn status(&self) -> Status {
        Status::from_bits(self.status_bits())
    }

    fn expect(&self, status: Status, what: &str) -> Check {
        self.expect_one(&[status], what)
    }

    fn expect_one(&self, statuses: &[Status], what: &str) -> Check {
        if statuses.iter().any(|status| self.status().is(*status)) {
            return Ok(());
        }
        let names: Vec<String> = statuses.iter().map(|status| name(*status)).collect();
        failed(format!(
            "{what}: expected {}, got {}",
            names.join(" or "),
            name(self.status())
        ))
    }

    fn succeeds(&self, what: &str) -> Check {
        self.expect(Status::SUCCESS, what)
    }

    fn refused(&self, status: Status, what: &str) -> Check {
        self.expect(status, what)?;
        require!(
            self.status().dnr(),
            "{what}: {} without Do Not Retry, although a retry must fail again",
            name(status)
        );
        Ok(())
    }

    fn fails(&self, what: &str) -> Check {
        require!(
            !self.status().is_success(),
            "{what}: expected an error, but it succeeded"
        );
        Ok(())
    }
}
