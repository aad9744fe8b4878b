//! Data of Reservation Report ("NVMe Base 2.1", 7.8).

use crate::host::HostId;
use crate::state::Reservations;
use nvme::cmd::reservation::{
    EXTENDED_STATUS_RESERVED, NO_CONTROLLER, RegistrantExtended, ReservationStatus, Rtype,
};
use zerocopy::IntoBytes;

impl Reservations {
    /// Returns the Reservation Status data structure, extended or not. The short form has only the
    /// low 64 bits of each Host Identifier. `controller` returns the ID of a controller that is
    /// associated with a host, if there is one.
    pub fn report(&self, extended: bool, controller: impl Fn(&HostId) -> Option<u16>) -> Vec<u8> {
        let rtype = self.reservation.map(|held| held.rtype.rtype());
        let header = ReservationStatus {
            r#gen: self.generation.into(),
            rtype: rtype.unwrap_or(Rtype::NONE),
            regstrnt: (self.registrants.len() as u16).into(),
            ptpls: self.ptpl.into(),
            ..Default::default()
        };
        let mut bytes = header.as_bytes().to_vec();
        if extended {
            bytes.extend([0; EXTENDED_STATUS_RESERVED]);
        }
        for registrant in &self.registrants {
            let host = &registrant.host;
            let cntlid = controller(host).unwrap_or(NO_CONTROLLER).into();
            let rcsts = self.is_holder(host).into();
            let rkey = registrant.key.into();
            if extended {
                let entry = RegistrantExtended {
                    cntlid,
                    rcsts,
                    rkey,
                    hostid: *host.bytes(),
                    ..Default::default()
                };
                bytes.extend(entry.as_bytes());
            } else {
                let entry = nvme::cmd::reservation::Registrant {
                    cntlid,
                    rcsts,
                    rkey,
                    hostid: host.low().into(),
                    ..Default::default()
                };
                bytes.extend(entry.as_bytes());
            }
        }
        bytes
    }
}
