//! Interception of PQAP on a host with hardware that executes AP instructions for the guest. Only
//! AQIC is intercepted, and only if host and guest have the facilities. All else returns "not
//! supported", which the host handles as an unknown instruction.

use crate::command::{Facilities, Function, InterruptControl, Pqap, ProgramException};
use crate::matrix::Apqn;
use crate::mediated::Mediated;
use crate::outside::{Clock, Pages, Queues, Subclasses};
use crate::status::{QueueStatus, Response};

/// Facilities of host and guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The host executes AP instructions.
    pub host_instructions: bool,
    /// The host can deliver adapter interrupts to a running guest (AIV).
    pub host_adapter_interruptions: bool,
    /// The guest's facilities; `instructions` is the APIE control.
    pub guest: Facilities,
}

/// Registers of the vCPU that executes PQAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// General registers 0, 1 and 2.
    pub gr: [u64; 3],
    /// The vCPU is in the problem state (P bit of the PSW).
    pub problem_state: bool,
}

/// Result of the interception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterceptOutcome {
    /// The instruction was executed. This is the word for general register 1; it also determines
    /// the condition code.
    Status(QueueStatus),
    /// A program interruption for the guest.
    Exception(ProgramException),
    /// The host's general handling must follow (-EOPNOTSUPP).
    NotSupported,
}

/// Handler of intercepted AQIC instructions.
pub trait Hook {
    /// Executes PQAP(AQIC).
    fn aqic(&mut self, apqn: Apqn, control: InterruptControl) -> QueueStatus;
}

impl<P: Pages, S: Subclasses, C: Clock, Q: Queues> Hook for Mediated<P, S, C, Q> {
    fn aqic(&mut self, apqn: Apqn, control: InterruptControl) -> QueueStatus {
        Mediated::aqic(self, apqn, control)
    }
}

/// Handles an intercepted PQAP. Without a hook the guest has no queues.
pub fn pqap(
    installed: Installed,
    registers: Registers,
    hook: Option<&mut dyn Hook>,
) -> InterceptOutcome {
    let [gr0, gr1, gr2] = registers.gr;
    let ours = installed.host_instructions && installed.guest.instructions;
    if !ours || (gr0 >> 24) & 0xff != 3 {
        return InterceptOutcome::NotSupported;
    }
    let pqap = match Pqap::decode(gr0, installed.guest, registers.problem_state) {
        Ok(pqap) => pqap,
        Err(exception) => return InterceptOutcome::Exception(exception),
    };
    debug_assert_eq!(pqap.function, Function::Aqic);
    if !installed.host_adapter_interruptions {
        return InterceptOutcome::NotSupported;
    }
    InterceptOutcome::Status(match hook {
        Some(hook) => hook.aqic(pqap.apqn, InterruptControl::decode(gr1, gr2)),
        None => QueueStatus::of(Response::QUEUE_NOT_AVAILABLE),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Seen(alloc::vec::Vec<(Apqn, InterruptControl)>);

    impl Hook for Seen {
        fn aqic(&mut self, apqn: Apqn, control: InterruptControl) -> QueueStatus {
            self.0.push((apqn, control));
            QueueStatus::default()
        }
    }

    const ALL: Installed = Installed {
        host_instructions: true,
        host_adapter_interruptions: true,
        guest: Facilities::ALL,
    };

    const ENABLE: Registers = Registers {
        gr: [0x0300_0106, 0x0000_8000_0000_0006, 0x5000],
        problem_state: false,
    };

    fn run(installed: Installed, registers: Registers) -> (InterceptOutcome, usize) {
        let mut seen = Seen(alloc::vec::Vec::new());
        let outcome = pqap(installed, registers, Some(&mut seen));
        (outcome, seen.0.len())
    }

    #[test]
    fn aqic_calls_hook() {
        let mut seen = Seen(alloc::vec::Vec::new());
        let outcome = pqap(ALL, ENABLE, Some(&mut seen));
        assert_eq!(outcome, InterceptOutcome::Status(QueueStatus::default()));
        let (gr1, gr2) = (ENABLE.gr[1], ENABLE.gr[2]);
        assert_eq!(
            seen.0,
            [(Apqn::new(1, 6), InterruptControl::decode(gr1, gr2))]
        );
    }

    #[test]
    fn pqap_without_facility_is_not_intercepted() {
        let no_host = Installed {
            host_instructions: false,
            ..ALL
        };
        let no_guest = Installed {
            guest: Facilities::NONE,
            ..ALL
        };
        let no_delivery = Installed {
            host_adapter_interruptions: false,
            ..ALL
        };
        for installed in [no_host, no_guest, no_delivery] {
            assert_eq!(run(installed, ENABLE), (InterceptOutcome::NotSupported, 0));
        }
        // The problem state makes no difference: an instruction that is not installed is not ours
        // to forbid.
        let problem = Registers {
            problem_state: true,
            ..ENABLE
        };
        assert_eq!(run(no_host, problem), (InterceptOutcome::NotSupported, 0));
    }

    #[test]
    fn pqap_other_than_aqic_is_not_supported() {
        for code in (0..=0xff).filter(|code| *code != 3) {
            let registers = Registers {
                gr: [code << 24 | 0x0106, 0, 0],
                problem_state: false,
            };
            assert_eq!(
                run(ALL, registers),
                (InterceptOutcome::NotSupported, 0),
                "{code}"
            );
        }
    }

    #[test]
    fn exceptions_precede_hook() {
        let problem = Registers {
            problem_state: true,
            ..ENABLE
        };
        let privileged = InterceptOutcome::Exception(ProgramException::PrivilegedOperation);
        assert_eq!(run(ALL, problem), (privileged, 0));
        let no_aqic = Installed {
            guest: Facilities {
                interruption: false,
                ..Facilities::ALL
            },
            ..ALL
        };
        let specification = InterceptOutcome::Exception(ProgramException::Specification);
        assert_eq!(run(no_aqic, ENABLE), (specification, 0));
    }

    #[test]
    fn aqic_without_hook_returns_queue_not_available() {
        let gone = QueueStatus::of(Response::QUEUE_NOT_AVAILABLE);
        assert_eq!(pqap(ALL, ENABLE, None), InterceptOutcome::Status(gone));
    }
}
