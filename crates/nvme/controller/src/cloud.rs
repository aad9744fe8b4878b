//! Imitation of disks of a cloud. The cloud's images identify a disk by model and PCI IDs and by
//! vendor specific bytes. Their udev rules derive device names from these.
//!
//! - Amazon: the device name is at the beginning of the vendor specific bytes of Identify
//!   Controller (byte 3072), 32 characters, padded with spaces. `ebsnvme-id` of amazon-ec2-utils
//!   and `nvme amzn id-ctrl` read it. The serial number is the volume's ID.
//! - Google: the vendor specific bytes of Identify Namespace (byte 384) contain JSON with
//!   `device_name`, which `google_nvme_id` of guest-configs reads.
//! - Azure: the model number identifies the disk type, and the namespace ID is the LUN plus 2; 1 is
//!   the boot disk. The rules are in azure-vm-utils.

use crate::pci::PciIds;
use nvme::identify::{IdentifyController, IdentifyNamespace};
use std::fmt;
use std::str::FromStr;

/// Maximum length of a device name in bytes: the size of Amazon's field.
const MAX_NAME_LEN: usize = 32;

/// Cloud provider whose disks the controller imitates: model number, PCI IDs and vendor specific
/// bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cloud {
    /// Amazon EBS volume, attached under this device name.
    Amazon(String),
    /// Google persistent disk with this device name.
    Google(String),
    /// Azure remote disk.
    Azure,
}

/// Reason why a text cannot be parsed as a [`Cloud`].
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CloudError {
    /// The text has none of the forms `amazon:DEVICE`, `google:NAME` and `azure`.
    #[error("\"{0}\": amazon:DEVICE, google:NAME or azure is expected")]
    Unknown(String),
    /// The cloud requires a device name, and the text contains none.
    #[error("{0} needs a name, as in {0}:{1}")]
    NoName(&'static str, &'static str),
    /// The device name is empty, too long, or has a character other than letters, digits and
    /// `-_./`.
    #[error("\"{0}\": a name has 1 to 32 letters, digits, and any of - _ . /")]
    Name(String),
}

impl FromStr for Cloud {
    type Err = CloudError;

    /// Parses `amazon:DEVICE`, `google:NAME` or `azure`.
    fn from_str(text: &str) -> Result<Self, CloudError> {
        let (cloud, name) = match text.split_once(':') {
            Some((cloud, name)) => (cloud, Some(name)),
            None => (text, None),
        };
        let named = |example| {
            let which = if cloud == "amazon" {
                "amazon"
            } else {
                "google"
            };
            let name = name.ok_or(CloudError::NoName(which, example))?;
            let fits = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
            if (1..=MAX_NAME_LEN).contains(&name.len()) && name.chars().all(fits) {
                Ok(name.to_owned())
            } else {
                Err(CloudError::Name(name.to_owned()))
            }
        };
        match (cloud, name) {
            ("amazon", _) => named("/dev/sdf").map(Cloud::Amazon),
            ("google", _) => named("data-1").map(Cloud::Google),
            ("azure", None) => Ok(Cloud::Azure),
            _ => Err(CloudError::Unknown(text.to_owned())),
        }
    }
}

impl fmt::Display for Cloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cloud::Amazon(device) => write!(f, "amazon:{device}"),
            Cloud::Google(name) => write!(f, "google:{name}"),
            Cloud::Azure => f.write_str("azure"),
        }
    }
}

impl Cloud {
    /// Returns the model number of the cloud's disks.
    pub fn model(&self) -> &'static str {
        match self {
            Cloud::Amazon(_) => "Amazon Elastic Block Store",
            Cloud::Google(_) => "nvme_card-pd",
            Cloud::Azure => "MSFT NVMe Accelerator v1.0",
        }
    }

    /// Returns the PCI IDs of the cloud's disks.
    pub fn pci(&self) -> PciIds {
        let (vendor, device) = match self {
            Cloud::Amazon(_) => (0x1d0f, 0x8061),
            Cloud::Google(_) => (0x1ae0, 0x001f),
            Cloud::Azure => (0x1414, 0x00a9),
        };
        PciIds {
            vendor,
            device,
            subsystem_vendor: vendor,
            subsystem: device,
            ..PciIds::default()
        }
    }

    /// Sets the cloud's vendor specific bytes of Identify Controller.
    pub(crate) fn describe(&self, page: &mut IdentifyController) {
        if let Cloud::Amazon(device) = self {
            let (name, _) = page.vs.split_at_mut(MAX_NAME_LEN);
            name.fill(b' ');
            put(name, device);
        }
    }

    /// Sets the cloud's vendor specific bytes of Identify Namespace. If the controller has several
    /// namespaces, only the first one gets the configured device name unchanged.
    pub(crate) fn describe_namespace(&self, nsid: u32, page: &mut IdentifyNamespace) {
        if let Cloud::Google(name) = self {
            let suffix = match nsid {
                1 => String::new(),
                nsid => format!("-{nsid}"),
            };
            let json =
                format!("{{\"device_name\":\"{name}{suffix}\",\"disk_type\":\"PERSISTENT\"}}");
            put(&mut page.vs, &json);
        }
    }
}

fn put(bytes: &mut [u8], text: &str) {
    let places = bytes.iter_mut().zip(text.bytes());
    places.for_each(|(place, byte)| *place = byte);
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn cloud_names_parse_and_print() {
        for text in ["amazon:/dev/sdf", "google:data-1", "azure"] {
            assert_eq!(text.parse::<Cloud>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("", CloudError::Unknown(String::new())),
            ("amazon", CloudError::NoName("amazon", "/dev/sdf")),
            ("google", CloudError::NoName("google", "data-1")),
            ("azure:x", CloudError::Unknown("azure:x".into())),
            ("aws:sdf", CloudError::Unknown("aws:sdf".into())),
            ("amazon:", CloudError::Name(String::new())),
            ("google:a\"b", CloudError::Name("a\"b".into())),
            ("google:a b", CloudError::Name("a b".into())),
        ] {
            assert_eq!(text.parse::<Cloud>(), Err(expected), "{text}");
        }
        let long = "x".repeat(33);
        let error = Err(CloudError::Name(long.clone()));
        assert_eq!(format!("amazon:{long}").parse::<Cloud>(), error);
    }

    #[test]
    fn cloud_names_are_at_vendor_offsets() {
        let mut page = IdentifyController::new_zeroed();
        Cloud::Amazon("sdf".into()).describe(&mut page);
        let (name, rest) = page.vs.split_at(32);
        assert_eq!(name, b"sdf                             ");
        assert!(rest.iter().all(|byte| *byte == 0));
        let google = Cloud::Google("data-1".into());
        for (nsid, text) in [
            (
                1,
                "{\"device_name\":\"data-1\",\"disk_type\":\"PERSISTENT\"}\0",
            ),
            (
                7,
                "{\"device_name\":\"data-1-7\",\"disk_type\":\"PERSISTENT\"}\0",
            ),
        ] {
            let mut page = IdentifyNamespace::new_zeroed();
            google.describe_namespace(nsid, &mut page);
            assert!(page.vs.starts_with(text.as_bytes()));
        }
    }
}
