//! Reservation commands after their fields were checked ("NVMe Base 2.1", 7.5 to 7.7).

use crate::types::{ReservationRefusal, ReservationType};
use nvme::cmd::reservation::{
    AcquireCdw10, AcquireData, Cptpl, Racqa, RegisterCdw10, RegisterData, ReleaseCdw10,
    ReleaseData, Rrega, Rrela,
};

/// A reservation operation. `key` is the host's own current key. `ptpl` is the new Persist Through
/// Power Loss state, or `None` to keep it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Registers a key for the host (Reservation Register).
    Register {
        /// Reservation key to register.
        key: u64,
        /// New state of Persist Through Power Loss (PTPL); `None` for no change.
        ptpl: Option<bool>,
    },
    /// Removes the registration of the host.
    Unregister {
        /// Current key of the host; `None` if it is not checked (IEKEY), even for an unregistered
        /// host.
        key: Option<u64>,
        /// New state of Persist Through Power Loss (PTPL); `None` for no change.
        ptpl: Option<bool>,
    },
    /// Replaces the registered key of the host.
    Replace {
        /// Current key of the host; `None` if it is not checked (IEKEY), even for an unregistered
        /// host.
        key: Option<u64>,
        /// New reservation key.
        new: u64,
        /// New state of Persist Through Power Loss (PTPL); `None` for no change.
        ptpl: Option<bool>,
    },
    /// Acquires the reservation for the host, if there is none.
    Acquire {
        /// Registered key of the host (CRKEY).
        key: u64,
        /// Type of the reservation to acquire.
        rtype: ReservationType,
    },
    /// Unregisters other registrants, and acquires the reservation for the host if one of them
    /// holds it.
    Preempt {
        /// Registered key of the host (CRKEY).
        key: u64,
        /// Key of the registrants to remove. With 0, when all registrants hold the reservation, all
        /// but the host are removed.
        victim: u64,
        /// Type of the reservation that the host acquires.
        rtype: ReservationType,
        /// Whether outstanding commands of preempted hosts are aborted.
        abort: bool,
    },
    /// Releases the reservation that the host holds.
    Release {
        /// Registered key of the host (CRKEY).
        key: u64,
        /// Type of the reservation to release, which must be the current one.
        rtype: ReservationType,
    },
    /// Removes the reservation and all registrants.
    Clear {
        /// Registered key of the host (CRKEY).
        key: u64,
    },
    /// Sets Persist Through Power Loss only, as the feature Reservation Persistence does.
    Persist {
        /// New state of Persist Through Power Loss (PTPL).
        ptpl: bool,
    },
}

impl Operation {
    /// Parses Reservation Register.
    ///
    /// # Errors
    /// [`ReservationRefusal::InvalidField`] for a reserved action or change of PTPL.
    pub fn register(cdw10: RegisterCdw10, data: &RegisterData) -> Result<Self, ReservationRefusal> {
        let ptpl = match cdw10.cptpl() {
            Cptpl::NO_CHANGE => None,
            Cptpl::CLEAR => Some(false),
            Cptpl::SET => Some(true),
            _ => return Err(ReservationRefusal::InvalidField),
        };
        let key = (!cdw10.iekey()).then(|| data.crkey.get());
        let new = data.nrkey.get();
        match cdw10.rrega() {
            Rrega::REGISTER => Ok(Self::Register { key: new, ptpl }),
            Rrega::UNREGISTER => Ok(Self::Unregister { key, ptpl }),
            Rrega::REPLACE => Ok(Self::Replace { key, new, ptpl }),
            _ => Err(ReservationRefusal::InvalidField),
        }
    }

    /// Parses Reservation Acquire.
    ///
    /// # Errors
    /// [`ReservationRefusal::InvalidField`] for a reserved action or type, or when IEKEY is set.
    pub fn acquire(cdw10: AcquireCdw10, data: &AcquireData) -> Result<Self, ReservationRefusal> {
        if cdw10.iekey() {
            return Err(ReservationRefusal::InvalidField);
        }
        let rtype = ReservationType::of(cdw10.rtype()).ok_or(ReservationRefusal::InvalidField)?;
        let (key, victim) = (data.crkey.get(), data.prkey.get());
        let preempt = |abort| Self::Preempt {
            key,
            victim,
            rtype,
            abort,
        };
        match cdw10.racqa() {
            Racqa::ACQUIRE => Ok(Self::Acquire { key, rtype }),
            Racqa::PREEMPT => Ok(preempt(false)),
            Racqa::PREEMPT_AND_ABORT => Ok(preempt(true)),
            _ => Err(ReservationRefusal::InvalidField),
        }
    }

    /// Parses Reservation Release.
    ///
    /// # Errors
    /// [`ReservationRefusal::InvalidField`] for a reserved action, a reserved type where it
    /// matters, or when IEKEY is set.
    pub fn release(cdw10: ReleaseCdw10, data: &ReleaseData) -> Result<Self, ReservationRefusal> {
        if cdw10.iekey() {
            return Err(ReservationRefusal::InvalidField);
        }
        let key = data.crkey.get();
        match cdw10.rrela() {
            Rrela::RELEASE => {
                let rtype =
                    ReservationType::of(cdw10.rtype()).ok_or(ReservationRefusal::InvalidField)?;
                Ok(Self::Release { key, rtype })
            }
            Rrela::CLEAR => Ok(Self::Clear { key }),
            _ => Err(ReservationRefusal::InvalidField),
        }
    }

    /// Returns whether the operation aborts outstanding commands of preempted hosts.
    pub const fn aborts(&self) -> bool {
        matches!(self, Self::Preempt { abort: true, .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dword_10_is_decoded_or_refused_for_every_value() {
        let data = RegisterData {
            crkey: 1.into(),
            nrkey: 2.into(),
        };
        let preempt = AcquireData {
            crkey: 1.into(),
            prkey: 2.into(),
        };
        let release = ReleaseData { crkey: 1.into() };
        for low in 0..0x10_000_u32 {
            for high in 0..4_u32 {
                // Bits 29:16 are reserved, bit 4 is about dispersed namespaces: neither counts.
                let bits = high << 30 | 0x2aaa_0000 | low;
                let action = low & 7;
                let iekey = low & 8 != 0;
                let rtype = low >> 8;
                let register = Operation::register(RegisterCdw10::from_bits(bits), &data);
                assert_eq!(register.is_ok(), action < 3 && high != 1, "{bits:#x}");
                let acquire = Operation::acquire(AcquireCdw10::from_bits(bits), &preempt);
                let known = (1..=6).contains(&rtype);
                assert_eq!(acquire.is_ok(), action < 3 && !iekey && known, "{bits:#x}");
                let release = Operation::release(ReleaseCdw10::from_bits(bits), &release);
                let good = action == 1 || action == 0 && known;
                assert_eq!(release.is_ok(), good && !iekey, "{bits:#x}");
            }
        }
    }

    #[test]
    fn register_fields_are_decoded() {
        let data = RegisterData {
            crkey: 0xc.into(),
            nrkey: 0xe.into(),
        };
        let replace = RegisterCdw10::from_bits(0x8000_0002);
        assert_eq!(
            Operation::register(replace, &data),
            Ok(Operation::Replace {
                key: Some(0xc),
                new: 0xe,
                ptpl: Some(false)
            })
        );
        let unregister = RegisterCdw10::from_bits(0xc000_0009);
        assert_eq!(
            Operation::register(unregister, &data),
            Ok(Operation::Unregister {
                key: None,
                ptpl: Some(true)
            })
        );
        let data = AcquireData {
            crkey: 0xc.into(),
            prkey: 0xf.into(),
        };
        let acquire = AcquireCdw10::from_bits(0x0402);
        assert_eq!(
            Operation::acquire(acquire, &data),
            Ok(Operation::Preempt {
                key: 0xc,
                victim: 0xf,
                rtype: ReservationType::ExclusiveAccessRegistrantsOnly,
                abort: true
            })
        );
    }
}
