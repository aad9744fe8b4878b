//! Asynchronous events: NVMe Base 2.1, 5.1.2.

use bitfield_struct::bitfield;

use crate::log::Lid;
use crate::macros::open_values;

/// Dword 0 of the completion of an Asynchronous Event Request (NVMe Base 2.1, 5.1.2.1).
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEvent {
    /// Asynchronous Event Type.
    #[bits(3)]
    pub aet: EventType,
    #[bits(5)]
    __: u8,
    /// Asynchronous Event Information, for example an [`ErrorEvent`], [`SmartEvent`] or [`Notice`],
    /// depending on the type.
    pub aei: u8,
    /// Log page that the host reads to clear the event.
    #[bits(8)]
    pub lid: Lid,
    __: u8,
}

impl AsyncEvent {
    /// Creates an error event, which the host reads in the Error Information log.
    pub const fn error(event: ErrorEvent) -> Self {
        Self::of(EventType::ERROR, event.0, Lid::ERROR_INFORMATION)
    }

    /// Creates a health event, which the host reads in the SMART / Health Information log.
    pub const fn smart(event: SmartEvent) -> Self {
        Self::of(EventType::SMART, event.0, Lid::SMART)
    }

    /// Creates a notice, which the host reads in log page `lid`.
    pub const fn notice(notice: Notice, lid: Lid) -> Self {
        Self::of(EventType::NOTICE, notice.0, lid)
    }

    /// Creates an event from its type, information and log page.
    pub const fn of(aet: EventType, aei: u8, lid: Lid) -> Self {
        Self::new().with_aet(aet).with_aei(aei).with_lid(lid)
    }
}

open_values! {
    /// Type of an asynchronous event (3 bits).
    pub EventType: u8 {
        ERROR = 0, "Error event";
        SMART = 1, "SMART / Health status event";
        NOTICE = 2, "Notice event";
        IMMEDIATE = 3, "Immediate event";
        ONE_SHOT = 4, "One-Shot event";
        IO_COMMAND_SPECIFIC = 6, "I/O Command specific status event";
        VENDOR_SPECIFIC = 7, "Vendor specific event";
    }
}

open_values! {
    /// Asynchronous Event Information of an error event (NVMe Base 2.1, 5.1.2.1).
    pub ErrorEvent: u8 {
        INVALID_DOORBELL_REGISTER = 0, "Write to Invalid Doorbell Register";
        INVALID_DOORBELL_VALUE = 1, "Invalid Doorbell Write Value";
        DIAGNOSTIC_FAILURE = 2, "Diagnostic Failure";
        PERSISTENT_INTERNAL_ERROR = 3, "Persistent Internal Error";
        TRANSIENT_INTERNAL_ERROR = 4, "Transient Internal Error";
        FIRMWARE_IMAGE_LOAD_ERROR = 5, "Firmware Image Load Error";
    }
}

open_values! {
    /// Asynchronous Event Information of a health event (NVMe Base 2.1, 5.1.2.1).
    pub SmartEvent: u8 {
        RELIABILITY = 0, "NVM subsystem Reliability";
        TEMPERATURE_THRESHOLD = 1, "Temperature Threshold";
        SPARE_BELOW_THRESHOLD = 2, "Spare Below Threshold";
    }
}

open_values! {
    /// Asynchronous Event Information of a notice (NVMe Base 2.1, 5.1.2.1).
    pub Notice: u8 {
        NAMESPACE_ATTRIBUTE_CHANGED = 0x00, "Attached Namespace Attribute Changed";
        FIRMWARE_ACTIVATION_STARTING = 0x01, "Firmware Activation Starting";
        TELEMETRY_LOG_CHANGED = 0x02, "Telemetry Log Changed";
        ANA_CHANGE = 0x03, "Asymmetric Namespace Access Change";
        PREDICTABLE_LATENCY_AGGREGATE_CHANGE = 0x04, "Predictable Latency Event Aggregate Log Change";
        LBA_STATUS_ALERT = 0x05, "LBA Status Information Alert";
        ENDURANCE_GROUP_AGGREGATE_CHANGE = 0x06, "Endurance Group Event Aggregate Log Page Change";
        REACHABILITY_GROUP_CHANGE = 0x07, "Reachability Group Change";
        REACHABILITY_ASSOCIATION_CHANGE = 0x08, "Reachability Association Change";
        ALLOCATED_NAMESPACE_ATTRIBUTE_CHANGED = 0x09, "Allocated Namespace Attribute Changed";
        ZONE_DESCRIPTOR_CHANGED = 0xef, "Zone Descriptor Changed";
        DISCOVERY_LOG_CHANGE = 0xf0, "Discovery Log Page Change";
    }
}

open_values! {
    /// Asynchronous Event Information of an I/O command specific event of the NVM command set (NVMe
    /// Base 2.1, 5.1.2.1).
    pub IoCommandEvent: u8 {
        RESERVATION_LOG_AVAILABLE = 0, "Reservation Log Page Available";
        SANITIZE_COMPLETED = 1, "Sanitize Operation Completed";
        SANITIZE_COMPLETED_UNEXPECTED_DEALLOCATION = 2, "Sanitize Operation Completed With Unexpected Deallocation";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn async_event_encodes_dword_0() {
        let event = AsyncEvent::notice(
            Notice::NAMESPACE_ATTRIBUTE_CHANGED,
            Lid::CHANGED_NAMESPACE_LIST,
        );
        assert_eq!(event.into_bits(), 0x0004_0002);
        let event = AsyncEvent::error(ErrorEvent::INVALID_DOORBELL_VALUE);
        assert_eq!(event.into_bits(), 0x0001_0100);
        let event = AsyncEvent::smart(SmartEvent::SPARE_BELOW_THRESHOLD);
        assert_eq!(event.into_bits(), 0x0002_0201);
        assert_eq!(
            AsyncEvent::from_bits(0x00f0_f002).aei(),
            Notice::DISCOVERY_LOG_CHANGE.0
        );
    }
}
