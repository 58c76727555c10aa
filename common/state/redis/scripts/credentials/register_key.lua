-- uses: credentials
-- Registers the caller's key for its role and host, and answers the number of revocations. Keys
-- that were not renewed for long are removed; a process that was only cut off registers its key
-- again.
local reason = rejection_reason(args.host, args.public_key)
if reason then return reject('refused', reason) end
local role_keys = keys_of_role(args.role, args.host)
for public, value in pairs(read_hash(role_keys)) do
  local renewed_ms = tonumber(string.match(value, '^%d+')) or 0
  if renewed_ms < NOW - UNSEEN_MS then redis.call('HDEL', role_keys, public) end
end
store_key(args)
return cjson.encode({revocations = revocation_count()})
