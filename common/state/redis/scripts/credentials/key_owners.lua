-- uses: credentials
-- All of role@host at whose doors each of these keys stands: none who entered another's key takes
-- the other's place by that. The key of a bulk port counts while its process's other key does.
local function has_owner(own, public, shown)
  if not is_bulk(public) then return true end
  local owner = string.match(shown, ' (.*)$') or ''
  return redis.call('HEXISTS', own, owner) == 1 and redis.call('SISMEMBER', REVOKED, owner) == 0
end

local at = {}
for place, public in ipairs(args.keys) do
  at[place] = {revoked = redis.call('SISMEMBER', REVOKED, public) == 1}
end
for _, host in ipairs(redis.call('SMEMBERS', ADMITTED)) do
  for _, role in ipairs(args.roles) do
    local found = redis.call('HMGET', keys_of_role(role, host), unpack(args.keys))
    for place, shown in ipairs(found) do
      if shown and not at[place].revoked
        and has_owner(keys_of_role(role, host), args.keys[place], shown) then
        table.insert(at[place], role .. '@' .. host)
      end
    end
  end
end
local answer = {}
for place, holders in ipairs(at) do answer[place] = table.concat(holders, ' ') end
return cjson.encode({owners = answer})
