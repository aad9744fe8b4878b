//! PQAP as a program executes it: decoding and checks of general register 0, and the operands of
//! its functions.

use thiserror::Error;

use crate::matrix::Apqn;

/// Program exceptions that AP instructions raise, with their interruption codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ProgramException {
    /// 0x01: the instruction is not installed.
    #[error("operation exception")]
    Operation,
    /// 0x02: executed in the problem state.
    #[error("privileged-operation exception")]
    PrivilegedOperation,
    /// 0x05: an operand's address has no memory.
    #[error("addressing exception")]
    Addressing,
    /// 0x06: an operand is invalid.
    #[error("specification exception")]
    Specification,
}

impl ProgramException {
    /// Returns the program-interruption code.
    pub const fn code(self) -> u16 {
        match self {
            ProgramException::Operation => 0x01,
            ProgramException::PrivilegedOperation => 0x02,
            ProgramException::Addressing => 0x05,
            ProgramException::Specification => 0x06,
        }
    }
}

/// AP facilities of a guest's machine, with their bits in the facility list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facilities {
    /// The AP instructions are installed. No facility bit reports them; programs try PQAP.
    pub instructions: bool,
    /// 12: query configuration information (QCI), and with it extended addressing (APXA).
    pub configuration: bool,
    /// 15: facilities test (APFT), TAPQ with the T bit.
    pub test: bool,
    /// 65: queue interruption control (AQIC).
    pub interruption: bool,
}

impl Facilities {
    /// Facilities of a machine with all AP facilities installed.
    pub const ALL: Facilities = Facilities {
        instructions: true,
        configuration: true,
        test: true,
        interruption: true,
    };

    /// Facilities of a machine without AP instructions.
    pub const NONE: Facilities = Facilities {
        instructions: false,
        configuration: false,
        test: false,
        interruption: false,
    };

    /// Returns the facility bits that are set.
    pub fn bits(self) -> impl Iterator<Item = u8> {
        let all = [
            (self.configuration, 12),
            (self.test, 15),
            (self.interruption, 65),
        ];
        all.into_iter().filter_map(|(has, bit)| has.then_some(bit))
    }

    /// Sets these facility bits in a list that STFL or STFLE has stored. Bits beyond its end are
    /// dropped.
    pub fn add_to(self, list: &mut [u8]) {
        for bit in self.bits() {
            if let Some(byte) = list.get_mut(usize::from(bit / 8)) {
                *byte |= 0x80 >> (bit % 8);
            }
        }
    }
}

/// A function of PQAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// 0: test queue. `facilities`: the T bit, which also requests the facility bits.
    Tapq {
        /// The T bit of general register 0, which also requests the facility bits.
        facilities: bool,
    },
    /// 1: reset queue.
    Rapq,
    /// 2: reset and zeroize queue.
    Zapq,
    /// 3: interruption control.
    Aqic,
    /// 4: query configuration information, which names no queue.
    Qci,
}

/// A decoded PQAP that has passed all checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pqap {
    /// Function to execute.
    pub function: Function,
    /// Queue on which the function operates.
    pub apqn: Apqn,
}

/// The T bit of general register 0, with which TAPQ also requests the facility bits.
const T_BIT: u64 = 0x0080_0000;
/// Bits 41-47 of general register 0, which must be zeros.
const RESERVED: u64 = 0x007f_0000;
/// Bits of a queue number that only extended addressing uses: APID above 63, APQI above 15.
const EXTENDED: u64 = 0x0000_c0f0;

impl Pqap {
    /// Decodes general register 0, with the checks of Linux's `handle_pqap` (arch/s390/kvm/priv.c)
    /// in the same order.
    pub fn decode(
        gr0: u64,
        facilities: Facilities,
        problem_state: bool,
    ) -> Result<Pqap, ProgramException> {
        if !facilities.instructions {
            return Err(ProgramException::Operation);
        }
        if problem_state {
            return Err(ProgramException::PrivilegedOperation);
        }
        let code = (gr0 >> 24) & 0xff;
        let t = gr0 & T_BIT != 0;
        let known = match code {
            0 => true,
            1 | 2 => !t,
            3 => facilities.interruption && !t,
            4 => facilities.configuration && !t,
            _ => false,
        };
        let broken = gr0 & RESERVED != 0
            || (t && !facilities.test)
            || (gr0 & EXTENDED != 0 && !facilities.configuration);
        if broken || !known {
            return Err(ProgramException::Specification);
        }
        let function = match code {
            0 => Function::Tapq { facilities: t },
            1 => Function::Rapq,
            2 => Function::Zapq,
            3 => Function::Aqic,
            _ => Function::Qci,
        };
        Ok(Pqap {
            function,
            apqn: Apqn::from_register(gr0),
        })
    }
}

/// An interruption subclass, 0-7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subclass(u8);

impl Subclass {
    /// Creates a subclass from the low three bits.
    pub const fn new(bits: u8) -> Subclass {
        Subclass(bits & 7)
    }

    /// Returns the number of the subclass, 0-7.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Returns the bit in the leftmost byte of the right half of control register 6.
    pub const fn mask(self) -> u64 {
        0x8000_0000 >> self.0
    }
}

/// Parameters of PQAP(AQIC): general registers 1 and 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptControl {
    /// Disable interrupts of the queue.
    Disable,
    /// Enable interrupts of the queue.
    Enable {
        /// The guest's interruption subclass.
        subclass: Subclass,
        /// Guest absolute address of the notification byte.
        notification: u64,
    },
}

/// Bit 16 of general register 1, with which AQIC enables interrupts.
const IR_BIT: u64 = 1 << (63 - 16);

impl InterruptControl {
    /// Decodes general registers 1 and 2.
    pub const fn decode(gr1: u64, gr2: u64) -> InterruptControl {
        if gr1 & IR_BIT == 0 {
            return InterruptControl::Disable;
        }
        InterruptControl::Enable {
            subclass: Subclass::new((gr1 & 7) as u8),
            notification: gr2,
        }
    }

    /// Encodes the request into general registers 1 and 2.
    pub const fn encode(self) -> (u64, u64) {
        match self {
            InterruptControl::Disable => (0, 0),
            InterruptControl::Enable {
                subclass,
                notification,
            } => (IR_BIT | subclass.get() as u64, notification),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPECIFICATION: Result<Pqap, ProgramException> = Err(ProgramException::Specification);

    fn decode(gr0: u64) -> Result<Pqap, ProgramException> {
        Pqap::decode(gr0, Facilities::ALL, false)
    }

    #[test]
    fn pqap_decodes_function_codes() {
        let of = |function| {
            Ok(Pqap {
                function,
                apqn: Apqn::new(0x12, 0x34),
            })
        };
        assert_eq!(decode(0x1234), of(Function::Tapq { facilities: false }));
        assert_eq!(decode(0x0080_1234), of(Function::Tapq { facilities: true }));
        assert_eq!(decode(0x0100_1234), of(Function::Rapq));
        assert_eq!(decode(0x0200_1234), of(Function::Zapq));
        assert_eq!(decode(0x0300_1234), of(Function::Aqic));
        assert_eq!(decode(0x0400_1234), of(Function::Qci));
        // PQAP ignores the left half of the register.
        assert_eq!(decode(0xffff_ffff_0300_1234), of(Function::Aqic));
        for code in 5..=0xff {
            assert_eq!(decode(code << 24), SPECIFICATION, "{code}");
        }
    }

    #[test]
    fn pqap_without_facilities_is_operation_exception() {
        for gr0 in [0, 0x0300_0000, 0xff00_0000] {
            for problem in [false, true] {
                let got = Pqap::decode(gr0, Facilities::NONE, problem);
                assert_eq!(got, Err(ProgramException::Operation));
            }
        }
    }

    #[test]
    fn pqap_in_problem_state_is_privileged_operation() {
        for gr0 in [0, 0x0300_0000, 0x007f_0000, 0xff00_0000] {
            let got = Pqap::decode(gr0, Facilities::ALL, true);
            assert_eq!(got, Err(ProgramException::PrivilegedOperation));
        }
    }

    #[test]
    fn reserved_bits_or_missing_facilities_are_specification_exceptions() {
        for bit in 16..23 {
            assert_eq!(decode(1 << bit), SPECIFICATION, "bit {}", 63 - bit);
        }
        let without = |facilities| move |gr0| Pqap::decode(gr0, facilities, false);
        let no_test = without(Facilities {
            test: false,
            ..Facilities::ALL
        });
        assert_eq!(no_test(0x0080_0001), SPECIFICATION);
        assert!(no_test(0x0000_0001).is_ok());
        let no_interruption = without(Facilities {
            interruption: false,
            ..Facilities::ALL
        });
        assert_eq!(no_interruption(0x0300_0001), SPECIFICATION);
        assert!(no_interruption(0x0100_0001).is_ok());
        let no_configuration = without(Facilities {
            configuration: false,
            ..Facilities::ALL
        });
        assert_eq!(no_configuration(0x0400_0000), SPECIFICATION);
        for queue in [0x4001, 0x8001, 0x0010, 0x0080] {
            assert_eq!(no_configuration(queue), SPECIFICATION, "{queue:#x}");
        }
        assert!(no_configuration(0x3f0f).is_ok(), "APID 63, APQI 15");
        // Only TAPQ has a T bit.
        for code in 1..5 {
            assert_eq!(decode(code << 24 | T_BIT), SPECIFICATION);
        }
    }

    #[test]
    fn interrupt_control_round_trips() {
        let on = InterruptControl::Enable {
            subclass: Subclass::new(6),
            notification: 0x1234_5678,
        };
        assert_eq!(on.encode(), (0x0000_8000_0000_0006, 0x1234_5678));
        for control in [on, InterruptControl::Disable] {
            let (gr1, gr2) = control.encode();
            assert_eq!(InterruptControl::decode(gr1, gr2), control);
        }
    }

    #[test]
    fn facilities_set_bits_in_facility_list() {
        let mut list = [0; 16];
        Facilities::ALL.add_to(&mut list);
        assert_eq!((list[1], list[8]), (0x09, 0x40));
        assert_eq!(list.iter().filter(|b| **b != 0).count(), 2);
        let mut short = [0; 4];
        Facilities::ALL.add_to(&mut short);
        assert_eq!(short, [0, 0x09, 0, 0]);
        let mut none = [0; 16];
        Facilities::NONE.add_to(&mut none);
        assert_eq!(none, [0; 16]);
    }
}
