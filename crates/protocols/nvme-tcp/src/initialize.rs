//! Initialization of a connection: ICReq and ICResp ("NVMe over TCP Transport 1.1", 3.4.1).

use crate::frame::Digests;
use crate::pdu::{
    CommonHeader, INITIALIZE, Initialize, LEAST_H2C_DATA, MAX_ALIGNMENT, digests, kind,
};
use crate::violation::Violation;
use zerocopy::{FromBytes, IntoBytes};

/// Parameters of a connection that host and controller have negotiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Whether PDU headers have digests.
    pub header_digest: bool,
    /// Whether the data of PDUs has digests.
    pub data_digest: bool,
    /// Data alignment that the other side requires (HPDA or CPDA), in dwords, zero-based.
    pub alignment: u8,
    /// Maximum number of data bytes of one H2CData PDU.
    pub h2c_data: u32,
    /// Maximum number of outstanding requests to transfer (R2T) of a command, set by the host.
    pub r2t: u32,
}

impl ConnectionLimits {
    pub(crate) const fn digests(&self) -> Digests {
        Digests {
            header: self.header_digest,
            data: self.data_digest,
        }
    }
}

/// Parameters that a host requests in ICReq.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Host {
    /// Whether the host requests digests of PDU headers.
    pub header_digest: bool,
    /// Whether the host requests digests of PDU data.
    pub data_digest: bool,
}

impl Host {
    /// Encodes the ICReq PDU. It allows one outstanding R2T of any length for each command.
    pub fn request(&self) -> [u8; INITIALIZE] {
        let dgst = dgst(self.header_digest, self.data_digest);
        bytes(kind::IC_REQ, 0, dgst, 0)
    }

    /// Returns the negotiated parameters from the controller's ICResp PDU.
    ///
    /// # Errors
    /// [`Violation`] when the response is invalid, or lacks a digest that was requested.
    pub fn agree(&self, response: &[u8; INITIALIZE]) -> Result<ConnectionLimits, Violation> {
        let response = read(response, kind::IC_RESP)?;
        if response.dgst & 3 != dgst(self.header_digest, self.data_digest) {
            return Err(Violation::Negotiation(
                "the controller does not use the requested digests",
            ));
        }
        let h2c_data = response.limit.get();
        if h2c_data < LEAST_H2C_DATA || h2c_data % 4 != 0 {
            return Err(field(&response, "MAXH2CDATA", 12, h2c_data));
        }
        Ok(ConnectionLimits {
            header_digest: self.header_digest,
            data_digest: self.data_digest,
            alignment: response.pda,
            h2c_data,
            r2t: 1,
        })
    }
}

/// Parameters that a controller announces in ICResp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controller {
    /// Maximum data of one H2CData PDU in bytes: a multiple of 4, at least 4096.
    pub h2c_data: u32,
}

impl Controller {
    /// Returns the negotiated parameters from a host's ICReq PDU, and the ICResp PDU to send. The
    /// host chooses the digests.
    ///
    /// # Errors
    /// [`Violation`] when the request is invalid.
    /// [`Violation`].
    pub fn agree(
        &self,
        request: &[u8; INITIALIZE],
    ) -> Result<(ConnectionLimits, [u8; INITIALIZE]), Violation> {
        let request = read(request, kind::IC_REQ)?;
        let header_digest = request.dgst & digests::HEADER != 0;
        let data_digest = request.dgst & digests::DATA != 0;
        let h2c_data = (self.h2c_data & !3).max(LEAST_H2C_DATA);
        let limits = ConnectionLimits {
            header_digest,
            data_digest,
            alignment: request.pda,
            h2c_data,
            r2t: request.limit.get().saturating_add(1),
        };
        let dgst = dgst(header_digest, data_digest);
        Ok((limits, bytes(kind::IC_RESP, 0, dgst, h2c_data)))
    }
}

const fn dgst(header: bool, data: bool) -> u8 {
    let header = if header { digests::HEADER } else { 0 };
    header | if data { digests::DATA } else { 0 }
}

fn bytes(kind: u8, pda: u8, dgst: u8, limit: u32) -> [u8; INITIALIZE] {
    let pdu = Initialize {
        ch: CommonHeader {
            kind,
            hlen: INITIALIZE as u8,
            plen: (INITIALIZE as u32).into(),
            ..CommonHeader::default()
        },
        pfv: 0.into(),
        pda,
        dgst,
        limit: limit.into(),
        reserved: [0; 112],
    };
    zerocopy::transmute!(pdu)
}

fn field(pdu: &Initialize, field: &'static str, at: u8, value: u32) -> Violation {
    Violation::Field {
        kind: pdu.ch.kind,
        field,
        at,
        value,
    }
}

fn read(bytes: &[u8; INITIALIZE], kind: u8) -> Result<Initialize, Violation> {
    let pdu = Initialize::read_from_bytes(bytes.as_bytes());
    let pdu = pdu.map_err(|_| Violation::Kind(kind))?;
    let (ch, pda) = (pdu.ch, pdu.pda);
    if ch.kind != kind {
        return Err(Violation::Kind(ch.kind));
    }
    if usize::from(ch.hlen) != INITIALIZE {
        return Err(field(&pdu, "header length", 2, ch.hlen.into()));
    }
    if ch.plen.get() as usize != INITIALIZE {
        return Err(field(&pdu, "length", 4, ch.plen.get()));
    }
    if pdu.pfv.get() != 0 {
        return Err(Violation::Negotiation(
            "another format of PDUs than 1.0 (PFV 0)",
        ));
    }
    if pda > MAX_ALIGNMENT {
        return Err(field(&pdu, "data alignment", 10, pda.into()));
    }
    Ok(pdu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_and_controller_negotiate_digests() {
        for (header_digest, data_digest) in
            [(false, false), (true, false), (false, true), (true, true)]
        {
            let host = Host {
                header_digest,
                data_digest,
            };
            let request = host.request();
            assert_eq!(
                request[..16],
                [0, 0, 128, 0, 128, 0, 0, 0, 0, 0, 0, request[11], 0, 0, 0, 0]
            );
            assert_eq!(
                request[11],
                u8::from(header_digest) | u8::from(data_digest) << 1
            );
            let controller = Controller { h2c_data: 1 << 20 };
            let (theirs, response) = controller.agree(&request).unwrap();
            let ours = host.agree(&response).unwrap();
            assert_eq!(ours, theirs);
            assert_eq!(
                (ours.header_digest, ours.data_digest),
                (header_digest, data_digest)
            );
            assert_eq!((ours.h2c_data, ours.r2t), (1 << 20, 1));
        }
    }

    #[test]
    fn each_invalid_field_is_refused() {
        let host = Host::default();
        let controller = Controller { h2c_data: 8192 };
        let (_, response) = controller.agree(&host.request()).unwrap();
        let wrong: &[(usize, u8)] = &[
            (0, 0),
            (0, 5),
            (2, 127),
            (4, 127),
            (5, 1),
            (8, 1),
            (10, 32),
            (11, 1),
            (11, 2),
            (12, 1),
            (13, 0),
        ];
        for &(at, value) in wrong {
            let mut response = response;
            response[at] = value;
            assert!(host.agree(&response).is_err(), "{at} {value}");
        }
        for (at, value) in [(0, 1), (2, 24), (4, 0), (9, 1), (10, 255)] {
            let mut request = host.request();
            request[at] = value;
            assert!(controller.agree(&request).is_err(), "{at} {value}");
        }
        let asks = Host {
            header_digest: true,
            ..host
        };
        assert!(matches!(
            asks.agree(&response),
            Err(Violation::Negotiation(_))
        ));
    }
}
