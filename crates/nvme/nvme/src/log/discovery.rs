//! Discovery log page: NVMe Base 2.1, 5.1.12.3.1.

use zerocopy::Unaligned;
use zerocopy::little_endian::{U16, U64};

use crate::identify::{Ascii, Nqn};
use crate::macros::{open_values, wire_struct};

open_values! {
    /// Transport Type (TRTYPE).
    #[derive(Unaligned)]
    pub TransportType: u8 {
        RDMA = 1, "rdma";
        FIBRE_CHANNEL = 2, "fc";
        TCP = 3, "tcp";
        INTRA_HOST = 254, "loop";
    }
}

open_values! {
    /// Address Family (ADRFAM).
    #[derive(Unaligned)]
    pub AddressFamily: u8 {
        IPV4 = 1, "ipv4";
        IPV6 = 2, "ipv6";
        INFINIBAND = 3, "ib";
        FIBRE_CHANNEL = 4, "fc";
        INTRA_HOST = 254, "loop";
    }
}

open_values! {
    /// Subsystem Type (SUBTYPE).
    #[derive(Unaligned)]
    pub SubsystemType: u8 {
        REFERRAL = 1, "discovery subsystem referral";
        NVM = 2, "nvme subsystem";
        CURRENT_DISCOVERY = 3, "current discovery subsystem";
    }
}

open_values! {
    /// Transport Specific Address Subtype of TCP: Security Type (SECTYPE).
    #[derive(Unaligned)]
    pub TcpSecurity: u8 {
        NONE = 0, "none";
        TLS_1_2 = 1, "tls";
        TLS_1_3 = 2, "tls13";
    }
}

/// Mask of the TREQ field for the secure channel: 0 not specified, 1 required, 2 not required.
pub const TREQ_SECURE_CHANNEL: u8 = 3;
/// Value of TREQ: a secure channel is required.
pub const TREQ_REQUIRED: u8 = 1;
/// Value of TREQ: a secure channel is not required.
pub const TREQ_NOT_REQUIRED: u8 = 2;
/// Bit of TREQ: the controller supports disabling flow control of submission queues.
pub const TREQ_NO_SQ_FLOW_CONTROL: u8 = 4;
/// CNTLID of a record of the dynamic controller model.
pub const CNTLID_DYNAMIC: u16 = 0xffff;

wire_struct! {
    /// Header of the Discovery log page, 1024 bytes, which the records follow.
    pub struct DiscoveryHeader(1024, zeroed) {
        /// Generation Counter, which changes whenever the log page changes.
        pub genctr @ 0: U64,
        /// Number of Records.
        pub numrec @ 8: U64,
        /// Record Format, 0.
        pub recfmt @ 16: U16,
        #[doc(hidden)]
        pub reserved18 @ 18: [u8; 1006],
    }
}

wire_struct! {
    /// Discovery log entry, 1024 bytes: a path to a subsystem.
    pub struct DiscoveryRecord(1024, zeroed) {
        /// Transport Type.
        pub trtype @ 0: TransportType,
        /// Address Family.
        pub adrfam @ 1: AddressFamily,
        /// Subsystem Type.
        pub subtype @ 2: SubsystemType,
        /// Transport Requirements.
        pub treq @ 3: u8,
        /// Port ID.
        pub portid @ 4: U16,
        /// Controller ID: [`CNTLID_DYNAMIC`], or FFFEh for any static controller.
        pub cntlid @ 6: U16,
        /// Admin Max SQ Size, in entries.
        pub asqsz @ 8: U16,
        /// Entry Flags.
        pub eflags @ 10: U16,
        #[doc(hidden)]
        pub reserved12 @ 12: [u8; 20],
        /// Transport Service Identifier, for example the TCP port number.
        pub trsvcid @ 32: Ascii<32>,
        #[doc(hidden)]
        pub reserved64 @ 64: [u8; 192],
        /// NVM Subsystem Qualified Name.
        pub subnqn @ 256: Nqn,
        /// Transport Address.
        pub traddr @ 512: Ascii<256>,
        /// Transport Specific Address Subtype. For TCP, the first byte is a [`TcpSecurity`].
        pub tsas @ 768: [u8; 256],
    }
}

impl DiscoveryRecord {
    /// Returns the security type of a TCP port.
    pub const fn tcp_security(&self) -> TcpSecurity {
        TcpSecurity(self.tsas[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    #[test]
    fn discovery_record_matches_wire_layout() {
        let record = DiscoveryRecord {
            trtype: TransportType::TCP,
            adrfam: AddressFamily::IPV4,
            subtype: SubsystemType::NVM,
            trsvcid: Ascii::new("4420").unwrap(),
            traddr: Ascii::new("10.0.0.1").unwrap(),
            subnqn: Nqn::new("nqn.x").unwrap(),
            ..DiscoveryRecord::default()
        };
        let bytes = record.as_bytes();
        assert_eq!(bytes[..4], [3, 1, 2, 0]);
        assert_eq!(bytes[32..37], *b"4420 ");
        assert_eq!(bytes[256..262], *b"nqn.x\0");
        assert_eq!(bytes[512..521], *b"10.0.0.1 ");
        assert_eq!(record.tcp_security(), TcpSecurity::NONE);
        let header = DiscoveryHeader {
            genctr: 3.into(),
            numrec: 1.into(),
            ..DiscoveryHeader::default()
        };
        assert_eq!(
            header.as_bytes()[..17],
            [3, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }
}
